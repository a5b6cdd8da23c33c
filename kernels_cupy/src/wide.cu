// Tree verification of 9 to 64 rows over a dense state and a log of at most 16 committed rows: products of warpgroups.
//
// Computes what verify.cu computes (the equations are there). A CTA is one warpgroup; it takes HEADS value heads of a
// key head one by one, or one of SHARES shares of a head's value rows, and goes over tiles of 64 value rows x DIM keys
// of S. All large products are wgmma: 64 value rows are the rows of the product, tree rows its columns, the second
// operand lies in shared memory. With 32 columns one instruction does what sixteen of mma.sync do, and needs no loads
// into registers.
//
// Rows and columns. A warp owns 16 value rows of a tile; lane 4 g + t holds value rows 2 g and 2 g + 1 (rows g and g +
// 8 of the product) and tree rows 8 i + 2 t and 8 i + 2 t + 1. S is the first operand, from registers: fp32 as bf16 hi
// + lo, bf16 as it is. The results are first operands of the next product as they stand: nothing moves between lanes.
//
// The system. Rows stand in blocks of 32 (16 if there are only 16). T = (I + L)^-1 of each block is made in fp32, from
// halves of 16 rows with a lane per column. With R = beta v - beta e^G S k - L_log u_log, block by block:
//     u_b = R_b + (T_b - I) R_b,   R_later -= L u_b,   o += C u_b
// R and u enter in three bf16 parts (24 bits; two where they act on outputs), T in three, L in two (three on long
// paths), C in two. Where records are bf16, two parts do for R, u and T, and u of the log is exact in one. C T, below, has
// the parts of T.
// One block and a bf16 state (MERGED): keys and queries are one operand of 2 ROWS columns, and so are [-L_log; C_log] and
//     [u; o] = [R; o of S and the log] + [T - I; C T] R
// which leaves three products to wait for in a tile. C T is made by the warps of the queries with mma.sync, from C in their
// registers. An fp32 state has no registers for it.
//
// Shared memory. Second operands are blocks of 8 rows x 16 bytes ("core matrices", no swizzle), 16-byte columns of all
// rows one after another: keys and queries come there by asynchronous copies of 16 bytes. Then: keys of the log and its
// weights, a state tile for each warp, the small matrices of one head, `Small`. 35 KiB for 16 rows and a bf16 state,
// 108 to 113 KiB for 64 rows and an fp32 state.
// Order. Cursors; the first tile as soon as the slot is known, then the log; gates, keys and queries with the cursors,
// or, in a CTA that starts beside the launch before it (`early`), when that has ended. An early CTA makes sums and
// norms of the log meanwhile, and folds its first tile if its request folds. With more than 16 rows, requests that fold
// come first in a batch of up to 32: their CTAs live longer, and must not be the last. Decays of all heads are made at
// once. For each head: the first tile meets the keys, its successor is asked for, then Grams, weights and inverses,
// then the solve; the copy of a tile starts when the one before is in registers. v of the tree and u of the log are
// prefetched into the L2 cache by the CTA's start and loaded where a tile begins, with 32 rows after the small
// matrices: registers. States leave the L2 cache first, cursors last.
// Occupancy. MIN_CTAS bounds the registers: up to 255 for 64 rows (two CTAs), 168 or 128 for 32 (three or four), 96 for
// 16 with a bf16 state (five); the tightest bounds spill (resources.csv). A plan asks for so much shared memory that no
// more CTAs fit than it says: else those of a small chained launch crowd on the multiprocessors that are free first. CTAs
// are at different points of their lives; what bounds them is latency, not tensor cores.
// Traffic and flushes: as verify.cu; a flush folds with mma.sync. wgmma exists on sm_90a only; verify.cu is for the
// rest.
#include "common.cuh"

#ifndef ROWS  // tree rows: 16, 32 or 64
#define ROWS 32
#endif
#ifndef LOG_BLOCKS  // 0, or 1 for a log of up to 16 rows
#define LOG_BLOCKS 1
#endif
#ifndef L_PARTS  // bf16 parts of L between blocks: 2, or 3 where paths are long
#define L_PARTS 2
#endif
#ifndef SHARES  // CTAs that divide the value rows of a head: 1 or 2
#define SHARES 1
#endif
#ifndef HEADS  // value heads of a CTA, one after another
#define HEADS 1
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 2
#endif
static_assert(HEADS == 1 || SHARES == 1, "a CTA has some heads or a share of one");
constexpr int THREADS = 128;
constexpr int BLOCK = ROWS < 32 ? ROWS : 32, BLOCKS = ROWS / BLOCK, STEPS = BLOCK / 16;  // k-steps of a block
constexpr int LOG_ROWS = LOG_BLOCKS ? 16 : 0, SYSTEM = LOG_ROWS + ROWS;                  // rows of the system
constexpr int COLUMNS = 2 * ROWS;                                                        // keys, then queries
constexpr int CHUNKS = DIM / 8, ROWS_AT_ONCE = THREADS / CHUNKS;  // 16-byte pieces of a key; key rows that all threads copy
constexpr int TILES = DIM / 64 / SHARES;  // of a head, in this CTA
// Threads stand for rows of the system, the log's first, of head after head: PLACES for each head, ITEMS for each thread.
constexpr int PLACES = SYSTEM > 64 ? 128 : 64, ITEMS = (HEADS * PLACES + THREADS - 1) / THREADS;

// ---- shared memory, in bytes; *_PITCH is from one 16-byte column to the next ----
constexpr int KEY_PITCH = COLUMNS * 16 + 16, KEY_BYTES = CHUNKS * KEY_PITCH;  // the odd 16 bytes spread the banks
constexpr int LOG_PITCH = 16 * 16 + 16, LOG_BYTES = LOG_BLOCKS ? CHUNKS * LOG_PITCH : 0;
constexpr int W_PITCH = COLUMNS * 16, W_BYTES = LOG_BLOCKS ? 2 * W_PITCH : 0;  // one part of [-L_log; C_log]
// A warp's tile. fp32: rows of 16-byte pieces that change places against bank conflicts. bf16: rows padded by 16 bytes, first
// the even ones, then the odd ones, as load_matrix4 wants them.
constexpr int ROW_BYTES = DIM * (int)sizeof(state_t) + (STATE_BF16 ? 16 : 0), STAGE_BYTES = 16 * ROW_BYTES;
constexpr bool LATE = ROWS == 32;                   // v and u of the log are loaded after the small matrices
constexpr bool MERGED = BLOCKS == 1 && STATE_BF16;  // keys and queries in one product, [T - I; C T] instead of T and C
constexpr int T_ROWS = MERGED ? COLUMNS : BLOCK, T_PITCH = T_ROWS * 16, T_BYTES = BLOCK / 8 * T_PITCH;
constexpr int SCRATCH_PITCH = BLOCK + 8;                                           // floats of a row of L where T will be
constexpr int SCRATCH_BYTES = BLOCK * SCRATCH_PITCH * 4, BLOCK_BYTES = PARTS * T_BYTES > SCRATCH_BYTES ? PARTS * T_BYTES : SCRATCH_BYTES;
constexpr int L_BYTES = BLOCKS > 1 ? BLOCK * BLOCK * 2 : 0;                        // one part of L of the second block's rows
DEVICE constexpr int c_pitch(int block) { return (ROWS - block * BLOCK) * 16; }
DEVICE constexpr int c_bytes(int block) { return BLOCK / 8 * c_pitch(block); }     // one part of C of a block's columns

constexpr int LOG_AT = KEY_BYTES, W_AT = LOG_AT + LOG_BYTES, STAGES_AT = W_AT + 2 * W_BYTES, T_AT = STAGES_AT + 4 * STAGE_BYTES;
constexpr int L_AT = T_AT + BLOCKS * BLOCK_BYTES, C_AT = L_AT + L_PARTS * L_BYTES;
constexpr int SMALL_AT = C_AT + (MERGED ? 0 : 2 * (c_bytes(0) + (BLOCKS > 1 ? c_bytes(BLOCKS - 1) : 0)));
DEVICE constexpr int c_at(int block) { return C_AT + (block ? 2 * c_bytes(0) : 0); }

#if ROWS > 32
typedef u64 mask_t;
#else
typedef u32 mask_t;
#endif

struct HeadRows {
  double g[ROWS];       // log decay of each tree row
  float2 G[16 + ROWS];  // its sum from the base over log 2, as a sum of two floats
  float2 in[ROWS];      // beta, beta e^G / |k|
  float out[ROWS];      // e^G DIM^-0.5 / |q|
  float beta[ROWS];
  float fold[16 + 4];   // e^{G_h - G_j} for a flush, then e^{G_h}
};

struct Small {
  mask_t mask[ROWS];
  float scale[COLUMNS + 16];  // 1 / |k|, DIM^-0.5 / |q|, then 1 / |k| of the log
  int record[ROWS];           // record row of a tree row
  int log_record[16];         // of a row of the log; of the first where there is no such row
  HeadRows head[HEADS];
};
#ifdef EXPECTED_SHARED_BYTES
static_assert(SMALL_AT + sizeof(Small) == EXPECTED_SHARED_BYTES, "WidePlan.shared_bytes");
#endif

// ---- products of a warpgroup ----

// An operand in shared memory without swizzle: core matrices of 8 rows are 128 bytes apart, 16-byte columns `pitch`. `base`
// is where the CTA's memory starts, in units of 16 bytes.
DEVICE u64 operand(u32 base, int offset, int pitch) {
  u64 descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(base + (u32)(pitch / 16 * 65536 + offset / 16)), "n"(128 / 16));
  return descriptor;
}
// A number that the compiler must not take for the same in the next turn of a loop: it would keep all its multiples.
DEVICE u32 anew(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait for all products, and name results, so that the compiler reads none of them earlier.
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <int SIZE>
DEVICE void name_results(float (&c)[SIZE]) {
#pragma unroll
  for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(c[i])::"memory");
}
DEVICE void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define F4(x, i) x (c[i]), x (c[i + 1]), x (c[i + 2]), x (c[i + 3])
#define F8(x) F4(x, 0), F4(x, 4)
#define F16(x) F8(x), F4(x, 8), F4(x, 12)
#define F32(x) F16(x), F4(x, 16), F4(x, 20), F4(x, 24), F4(x, 28)
#define CHANGED "+f"
#define MADE "=f"
#define P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define P16 P8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define P32 P16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA(add, n) "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {"
#define A_AND_B "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// c[64 x N] = a[64 x 16] b[N x 16]^T, a in registers; added to what c is if ADD.
template <bool ADD = true, int HALF>
DEVICE void multiply(float (&c)[HALF], const u32 (&a)[4], u64 b) {
  if constexpr (HALF == 8 && ADD)
    asm volatile(WGMMA("1", 16) P8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}" : F8(CHANGED) : A_AND_B);
  else if constexpr (HALF == 8)
    asm volatile(WGMMA("0", 16) P8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}" : F8(MADE) : A_AND_B);
  else if constexpr (HALF == 16 && ADD)
    asm volatile(WGMMA("1", 32) P16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}" : F16(CHANGED) : A_AND_B);
  else if constexpr (HALF == 16)
    asm volatile(WGMMA("0", 32) P16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}" : F16(MADE) : A_AND_B);
  else if constexpr (ADD)
    asm volatile(WGMMA("1", 64) P32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}" : F32(CHANGED) : A_AND_B);
  else
    asm volatile(WGMMA("0", 64) P32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}" : F32(MADE) : A_AND_B);
}

// The same with both in shared memory.
template <bool ADD, int HALF>
DEVICE void multiply(float (&c)[HALF], u64 a, u64 b) {
  if constexpr (HALF == 8 && ADD)
    asm volatile(WGMMA("1", 16) P8 "}, %8, %9, p, 1, 1, 0, 0;\n}" : F8(CHANGED) : "l"(a), "l"(b));
  else if constexpr (HALF == 8)
    asm volatile(WGMMA("0", 16) P8 "}, %8, %9, p, 1, 1, 0, 0;\n}" : F8(MADE) : "l"(a), "l"(b));
  else if constexpr (HALF == 16 && ADD)
    asm volatile(WGMMA("1", 32) P16 "}, %16, %17, p, 1, 1, 0, 0;\n}" : F16(CHANGED) : "l"(a), "l"(b));
  else if constexpr (HALF == 16)
    asm volatile(WGMMA("0", 32) P16 "}, %16, %17, p, 1, 1, 0, 0;\n}" : F16(MADE) : "l"(a), "l"(b));
  else if constexpr (ADD)
    asm volatile(WGMMA("1", 64) P32 "}, %32, %33, p, 1, 1, 0, 0;\n}" : F32(CHANGED) : "l"(a), "l"(b));
  else
    asm volatile(WGMMA("0", 64) P32 "}, %32, %33, p, 1, 1, 0, 0;\n}" : F32(MADE) : "l"(a), "l"(b));
}

// u of two neighbouring value rows of the log, as it is stored.
#if LOG_BF16
DEVICE u32 load_logged(const log_t* pointer) { return *(const u32*)pointer; }
DEVICE float2 floats_of(u32 pair) { return make_float2(low_half(pair), high_half(pair)); }
#else
DEVICE float2 load_logged(const log_t* pointer) { return *(const float2*)pointer; }
DEVICE float2 floats_of(float2 pair) { return pair; }
#endif

// 16 columns of a result from element `at` on, as a first operand in PARTS parts.
template <int SIZE>
DEVICE void split_columns(const float (&c)[SIZE], int at, u32 (&hi)[4], u32 (&mid)[4], u32 (&lo)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) split(c[at + 2 * i], c[at + 2 * i + 1], hi[i], mid[i], lo[i]);
}

DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes, or zeros.
DEVICE void copy_async16_or_zero(u32 shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

DEVICE void copy_tile(u32 stage, const state_t* tile, int lane) {
  constexpr int PIECES = DIM * (int)sizeof(state_t) / 16;  // of a row
#pragma unroll
  for (int i = 0; i < PIECES / 2; i++) {
    const int row = (32 * i + lane) / PIECES, piece = (32 * i + lane) % PIECES;
    const int place = STATE_BF16 ? ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + piece * 16
                                 : row * ROW_BYTES + (piece ^ (row >> 1 & 3) << 1) * 16;
    copy_once16(stage + place, (const u8*)(tile + row * DIM) + piece * 16);
  }
}

// |x|^2 of a part of a row of bf16, `COUNT` 16-byte columns.
template <int COUNT>
DEVICE float norm_of(const u8* row, int pitch) {
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum[i & 1] += sum_of_squares(*(const uint4*)(row + i * pitch));
  return sum[0] + sum[1];
}

// T - I of every block from L, which is there as floats: [T_11, 0; T_21, T_22] of blocks of 16 rows, T_21 = -T_22 L_21 T_11.
// `otherwise(first, count)` runs on `count` threads from `first` on: those without a block, or all after theirs.
template <typename Other>
DEVICE void make_inverses(u8* memory, int thread, float (&C)[ROWS / 2], Other otherwise) {
  constexpr int MAKERS = ROWS / 16;  // warps, one for each block of 16
  const int warp = thread >> 5, lane = thread & 31;
  auto scratch = [&](int block) { return (float*)(memory + T_AT + block * BLOCK_BYTES); };
  if (warp < MAKERS) {  // T_11 - I and T_22 - I: a lane per column of a block of 16
    float* L = scratch(warp * 16 / BLOCK) + warp * 16 % BLOCK * (SCRATCH_PITCH + 1);
    const int column = lane & 15;
    float T[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float sum = -L[i * SCRATCH_PITCH + column], other = 0.f;  // two chains
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = *(const float4*)(L + i * SCRATCH_PITCH + m);
        sum = fmaf(-l.x, T[m], sum);
        if (m + 1 < i) other = fmaf(-l.y, T[m + 1], other);
        if (m + 2 < i) sum = fmaf(-l.z, T[m + 2], sum);
        if (m + 3 < i) other = fmaf(-l.w, T[m + 3], other);
      }
      T[i] = sum + other;
    }
    __syncwarp();  // every lane has read L
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (lane < 16) L[i * SCRATCH_PITCH + column] = T[i];
  }
  if (MAKERS == 4) otherwise(0, THREADS);
  else if (warp >= MAKERS) otherwise(32 * MAKERS, THREADS - 32 * MAKERS);
  __syncthreads();
  if (BLOCK == 32) {
    // Two neighbouring columns of a row of X = L_21 T_11, then of T_21 = -T_22 X; X lies where L has nothing.
    const int row = thread / 8, column = thread % 8 * 2;
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        float* S = scratch(block);
        const float* left = S + (16 + row) * SCRATCH_PITCH + 16 * step;  // L_21, or T_22 - I
        const float* right = S + 16 * step + column;                     // T_11 - I, or X
        float2 sum = step ? *(const float2*)(right + row * SCRATCH_PITCH) : *(const float2*)(left + column);
#pragma unroll
        for (int m = 0; m < 16; m += 4) {
          const float4 x = *(const float4*)(left + m);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float2 y = *(const float2*)(right + (m + i) * SCRATCH_PITCH);
            const float w = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
            sum.x = fmaf(w, y.x, sum.x), sum.y = fmaf(w, y.y, sum.y);
          }
        }
        if (step == 0) *(float2*)(S + row * SCRATCH_PITCH + 16 + column) = sum;
        else *(float2*)(S + (16 + row) * SCRATCH_PITCH + column) = make_float2(-sum.x, -sum.y);
      }
      __syncthreads();
    }
  }
  if constexpr (MERGED) {
    // To bf16 parts, in the same place: T - I by the warps of the keys, C T = C + C (T - I) by those of the queries.
    constexpr int KEY_WARPS = ROWS / 16, PIECES = ROWS * BLOCK / 2 / (32 * KEY_WARPS);
    const float* T = scratch(0);
    const int g = lane >> 2, t = lane & 3;
    float x[2 * PIECES];
    if (warp < KEY_WARPS) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {  // row 16 warp + g + 8 (i % 2), columns 8 (i / 2) + 2 t
        const int row = 16 * warp + g + 8 * (i & 1), column = 8 * (i >> 1) + 2 * t;
        const float2 pair = *(const float2*)(T + row * SCRATCH_PITCH + column);
        x[2 * i] = column < row ? pair.x : 0.f, x[2 * i + 1] = column + 1 < row ? pair.y : 0.f;
      }
    } else if (warp < 2 * KEY_WARPS) {
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) x[i] = C[i];
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        u32 hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; i++) split2(C[8 * s + 2 * i], C[8 * s + 2 * i + 1], hi[i], lo[i]);
#pragma unroll
        for (int i = 0; i < 2 * s + 2; i++) {  // 8 columns; none above the diagonal
          u32 b_hi[2], b_lo[2];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float* from = T + (16 * s + 8 * half + 2 * t) * SCRATCH_PITCH + 8 * i + g;
            split2(from[0], from[SCRATCH_PITCH], b_hi[half], b_lo[half]);
          }
          float(&sum)[4] = *(float(*)[4])(x + 4 * i);
          mma(sum, lo, b_hi[0], b_hi[1]);
          mma(sum, hi, b_lo[0], b_lo[1]);
          mma(sum, hi, b_hi[0], b_hi[1]);
        }
      }
    }
    __syncthreads();
    if (warp < 2 * KEY_WARPS) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        u8* to = memory + T_AT + (i >> 1) * T_PITCH + (16 * warp + g + 8 * (i & 1)) * 16 + t * 4;
        u32 hi, mid, lo;
        split(x[2 * i], x[2 * i + 1], hi, mid, lo);
        *(u32*)to = hi, *(u32*)(to + T_BYTES) = mid;
        if (PARTS == 3) *(u32*)(to + 2 * T_BYTES) = lo;
      }
    }
  } else {
    // To bf16 parts, in the same place.
    constexpr int PAIRS = ROWS * BLOCK / 2 / THREADS, CHUNKS_AT_ONCE = THREADS / (BLOCK * 4);  // of a thread; of all
    const int row = thread % (BLOCK * 4) / 32 * 8 + lane / 4, first_chunk = thread / (BLOCK * 4);
    float2 x[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int block = i * CHUNKS_AT_ONCE / (BLOCK / 8), chunk = i * CHUNKS_AT_ONCE % (BLOCK / 8) + first_chunk;
      const int column = chunk * 8 + lane % 4 * 2;
      x[i] = *(const float2*)(scratch(block) + row * SCRATCH_PITCH + column);
      if (column >= row) x[i].x = 0.f;
      if (column + 1 >= row) x[i].y = 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int block = i * CHUNKS_AT_ONCE / (BLOCK / 8), chunk = i * CHUNKS_AT_ONCE % (BLOCK / 8) + first_chunk;
      u8* to = memory + T_AT + block * BLOCK_BYTES + chunk * T_PITCH + row * 16 + lane % 4 * 4;
      u32 hi, mid, lo;
      split(x[i].x, x[i].y, hi, mid, lo);
      *(u32*)to = hi, *(u32*)(to + T_BYTES) = mid;
      if (PARTS == 3) *(u32*)(to + 2 * T_BYTES) = lo;
    }
  }
}

// grid: (CTAs of a key head, key heads, requests). Offsets are 32-bit numbers of bytes from the start of an array, the
// state's apart; the host checks that they hold.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify_wide(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
            int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
            const float* __restrict__ A_log, const float* __restrict__ dt_bias, const u64* __restrict__ masks,
            int mask_pitch, state_t* state, const int* __restrict__ slots, log_t* u_records, u16* k_records,
            float* g_records, int record_rows, const int* __restrict__ log_length, const int* __restrict__ row_list,
            u16* __restrict__ output, int rows, int key_heads, int value_heads, int capacity, int reserve, float norm_eps,
            int early_ctas) {
  const int key_head = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, t = lane & 3;
  const int share = blockIdx.x % SHARES;
  const int first_head = (key_head * (gridDim.x / SHARES) + blockIdx.x / SHARES) * HEADS;

  extern __shared__ __align__(128) u8 memory[];
  const u32 keys = shared_address(memory), log_keys = keys + LOG_AT;
  const u32 stage = keys + STAGES_AT + warp * STAGE_BYTES;
  u8* own_stage = memory + STAGES_AT + warp * STAGE_BYTES;
  Small& small = *(Small*)(memory + SMALL_AT);

  // ---- first wave of loads: cursors, masks ----
  // Requests that fold live longer. Of a batch that a warp can look over they come first, so that none of them is among the
  // last CTAs of the launch.
  int request = blockIdx.z, length = 0, log_record = 0;
  if (LOG_BLOCKS && ROWS > 16 && gridDim.z <= 32) {
    const int its_length = lane < gridDim.z ? load_cursor(log_length + lane) : 0;
    const u32 folding = __ballot_sync(0xffffffffu, its_length > 0 && its_length + reserve > capacity), before = (1u << lane) - 1;
    const int rank = folding >> lane & 1 ? __popc(folding & before) : __popc(folding) + __popc(~folding & before);
    request = __ffs(__ballot_sync(0xffffffffu, rank == (int)blockIdx.z)) - 1;
  }
  const u32 record_base = request * record_rows, first_token = request * rows;
  const int slot = load_cursor(slots + request);
  if (LOG_BLOCKS) {
    length = min(load_cursor(log_length + request), LOG_ROWS);
    if (lane < min(record_rows, LOG_ROWS)) log_record = load_cursor(row_list + record_base + lane);
  }
  auto head_of = [&](int item) { return (tid + item * THREADS) / PLACES; };  // counted from the CTA's first
  const int my_row = tid % PLACES - LOG_ROWS;                                // the same of all items
  const bool is_tree = my_row >= 0 && my_row < rows;
  mask_t mask = 0;
  u32 my_a[ITEMS] = {}, my_b[ITEMS] = {};
  float my_A[ITEMS] = {}, my_bias[ITEMS] = {};
  if (is_tree) {
    mask = (mask_t)masks[(u32)request * mask_pitch + my_row];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (head_of(i) < HEADS) my_A[i] = A_log[first_head + head_of(i)], my_bias[i] = dt_bias[first_head + head_of(i)];
  }
  // What the launch before may have written: keys, queries, gates.
  const int chunk = tid % CHUNKS;
  const u32 of_key = key_head * DIM * 2 + chunk * 16;
  auto copy_keys = [&](u32 to, const u16* x, u32 pitch) {
    int row = tid / CHUNKS;
    to += chunk * KEY_PITCH + row * 16;
    u32 from = (first_token + row) * pitch + of_key;
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++, row += ROWS_AT_ONCE, from += ROWS_AT_ONCE * pitch)
      copy_async16_or_zero(to + i * ROWS_AT_ONCE * 16, (const u8*)x + from, row < rows);
  };
  auto load_rows = [&] {
    wait_for_launch_before();
    written_before(a), written_before(b), written_before(v);
    if (is_tree) {
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (head_of(i) < HEADS) {
          const u32 index = (first_token + my_row) * value_heads + first_head + head_of(i);
          my_a[i] = load_gate(a, index, gates_bf16), my_b[i] = load_gate(b, index, gates_bf16);
        }
    }
    copy_keys(keys, k, 2 * k_pitch);
    copy_keys(keys + ROWS * 16, q, 2 * q_pitch);
  };
  // CTAs that start beside the launch before ask for the state first; the others have nothing to wait for.
  const bool early = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) < early_ctas;
  if (!early) load_rows();
  if (slot < 0) {
    if (early) wait_for_launch_before();
    return;
  }

  // ---- second wave: rows of the log, the first tile ----
  const bool flush = LOG_BLOCKS && length > 0 && length + reserve > capacity;
  const bool sees_log = LOG_BLOCKS && length > 0 && !flush;
  const u32 record_bytes = value_heads * DIM * (u32)sizeof(log_t);  // u of one row
  const u32 key_bytes = key_heads * DIM * 2;
  u32 value = first_head * DIM + share * (DIM / SHARES) + warp * 16;  // this warp's first value row, of all heads
  state_t* tile = state + ((i64)slot * value_heads * DIM + value) * DIM;
  copy_tile(stage, tile, lane);
  int tree_record = my_row;
  float log_g[ITEMS] = {};
  if (LOG_BLOCKS) {
#pragma unroll
    for (int i = 0; i < LOG_ROWS / ROWS_AT_ONCE; i++) {
      const int r = tid / CHUNKS + i * ROWS_AT_ONCE, from = __shfl_sync(0xffffffffu, log_record, r & 15);
      copy_async16_or_zero(log_keys + chunk * LOG_PITCH + r * 16,
                           (const u8*)k_records + ((record_base + from) * key_bytes + of_key), r < length);
    }
    const int of_lane = __shfl_sync(0xffffffffu, log_record, lane & 15);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)  // of log row lane % 16
      if ((lane & 15) < length && head_of(i) < HEADS)
        log_g[i] = g_records[(record_base + of_lane) * value_heads + first_head + head_of(i)];
    if (is_tree) tree_record = row_list[record_base + length + my_row];
  }
  if (LOG_BLOCKS && length > 0) {
    constexpr int LINES = HEADS * DIM * (int)sizeof(log_t) / 128;
#pragma unroll
    for (int first = 0; first < LOG_ROWS * LINES; first += THREADS) {
      const int r = (first + tid) / LINES, from = __shfl_sync(0xffffffffu, log_record, r & 15);
      if (r < length)
        prefetch((const u8*)u_records + (record_base + from) * record_bytes + first_head * DIM * (u32)sizeof(log_t) +
                 (first + tid) % LINES * 128);
    }
    const int first = __shfl_sync(0xffffffffu, log_record, 0);
    if (tid < LOG_ROWS) small.log_record[tid] = tid < length ? log_record : first;
  }

  auto rows_of = [&](int item) -> HeadRows& { return small.head[head_of(item) < HEADS ? head_of(item) : 0]; };
  double G[ITEMS] = {};
  if (LOG_BLOCKS) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      HeadRows& head = rows_of(i);
      G[i] = log_g[i];  // sum of the log's decays up to row lane % 16, of all if the thread stands for a row of the tree
#pragma unroll
      for (int step = 1; step < 16; step *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, G[i], step, 16);
        if ((lane & 15) >= step) G[i] += before;
      }
      const double whole = __shfl_sync(0xffffffffu, G[i], 15);
      if (my_row >= 0) G[i] = flush ? 0.0 : whole;
      else if (flush && head_of(i) < HEADS) {
        head.fold[lane] = lane < length ? __expf((float)(whole - G[i])) : 0.f;
        if (lane == 0) head.fold[16] = exp_near_one((float)whole);
      }
    }
  }

  auto norms_of_log = [&] {
    constexpr int SHARERS = THREADS / 16;
    const int r = tid / SHARERS, part = tid % SHARERS * (CHUNKS / SHARERS);
    const float norm = sum_over<SHARERS>(norm_of<CHUNKS / SHARERS>(memory + LOG_AT + part * LOG_PITCH + r * 16, LOG_PITCH));
    if (tid % SHARERS == 0) small.scale[COLUMNS + r] = rsqrtf(norm + norm_eps);
  };
  // u of log rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9, which is in the L2 cache by now.
  using logged_t = decltype(load_logged(nullptr));
  auto load_log = [&](u32 my_value, logged_t(&logged)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int2 record = *(const int2*)&small.log_record[2 * t + 8 * i];
      const u8* from = (const u8*)u_records + (record_base * record_bytes + my_value * (u32)sizeof(log_t));
      logged[2 * i] = load_logged((const log_t*)(from + record.x * record_bytes));
      logged[2 * i + 1] = load_logged((const log_t*)(from + record.y * record_bytes));
    }
  };
  // Fold the log into the tile, S <- e^{G_h} S + sum_j fold_j u_j k_j^T, in its place, and write it.
  auto fold_tile = [&](const HeadRows& head, const logged_t(&logged)[4]) {
    [[maybe_unused]] const u32 matrix = anew(stage) + ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (lane >> 4) * 16;
    // Keys 2 t, 2 t + 1 (i < 2) or 2 t + 8, 2 t + 9 of k-step j, of value row 2 g (i even) or 2 g + 1.
    [[maybe_unused]] auto two_keys = [&](int j, int i) {
      const int piece = 4 * j + (t >> 1) + 2 * (i >> 1);
      return (float2*)(memory + STAGES_AT + anew(warp) * STAGE_BYTES + (2 * g + (i & 1)) * ROW_BYTES + (piece ^ (g & 3) << 1) * 16 + (t & 1) * 8);
    };
    u32 part[3][4];
    const float whole = head.fold[16];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = 2 * t + 8 * i;
      const float wx = head.fold[r] * small.scale[COLUMNS + r], wy = head.fold[r + 1] * small.scale[COLUMNS + r + 1];
      const float2 x = floats_of(logged[2 * i]), y = floats_of(logged[2 * i + 1]);
      split(wx * x.x, wy * y.x, part[0][2 * i], part[1][2 * i], part[2][2 * i]);
      split(wx * x.y, wy * y.y, part[0][2 * i + 1], part[1][2 * i + 1], part[2][2 * i + 1]);
    }
    const u32 fold_keys = log_keys + (lane >> 4) * LOG_PITCH + (lane & 15) * 16;
    constexpr int AT_ONCE = STATE_BF16 || MIN_CTAS <= 2 ? 2 : 1;  // k-steps, as registers allow
#pragma unroll 1
    for (int pair = 0; pair < K_STEPS; pair += AT_ONCE) {
      float left[AT_ONCE][4] = {}, right[AT_ONCE][4] = {};
      u32 x[AT_ONCE][4];
      [[maybe_unused]] u32 S[AT_ONCE][4];
#pragma unroll
      for (int odd = 0; odd < AT_ONCE; odd++) {
        load_matrix4_transposed(x[odd], fold_keys + 2 * (pair + odd) * LOG_PITCH);
#if STATE_BF16
        load_matrix4(S[odd], matrix + 32 * (pair + odd));
#endif
      }
#if STATE_BF16
      __syncwarp();  // every lane has read these keys of the tile
#endif
#pragma unroll
      for (int p = PARTS - 1; p >= 0; p--)
#pragma unroll
        for (int odd = 0; odd < AT_ONCE; odd++) {
          mma_in_order(left[odd], part[p], x[odd][0], x[odd][1]);
          mma_in_order(right[odd], part[p], x[odd][2], x[odd][3]);
        }
#pragma unroll
      for (int odd = 0; odd < AT_ONCE; odd++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int j = pair + odd;
          const float* more = (i < 2 ? left : right)[odd] + 2 * (i & 1);
#if STATE_BF16
          const u32 two = S[odd][i];
          *(u32*)(own_stage + ((i & 1) * 8 + g) * ROW_BYTES + 32 * j + 16 * (i >> 1) + 4 * t) =
              pack_bf16(fmaf(whole, low_half(two), more[0]), fmaf(whole, high_half(two), more[1]));
#else
          float2& two = *two_keys(j, i);
          two = make_float2(fmaf(whole, two.x, more[0]), fmaf(whole, two.y, more[1]));
          *(float2*)(tile + (2 * g + (i & 1)) * DIM + 16 * j + 8 * (i >> 1) + 2 * t) = two;
#endif
        }
    }
#if STATE_BF16
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
      const int row = (32 * i + lane) / CHUNKS, piece = (32 * i + lane) % CHUNKS;
      *(uint4*)(tile + row * DIM + piece * 8) =
          *(const uint4*)(own_stage + ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + piece * 16);
    }
#endif
  };

  // ---- third wave of the early, who fold their first tile while they wait ----
  if (early) {
    if (LOG_BLOCKS && length > 0) {
      copy_wait_all();
      __syncthreads();
      norms_of_log();
      if (flush) {
        __syncthreads();
        logged_t logged[4];
        load_log(value + 2 * g, logged);
        fold_tile(small.head[0], logged);
      }
    }
    load_rows();
  }
  {
    constexpr int LINES = HEADS * DIM / 64;  // 128-byte lines of one row of v
    for (int x = tid; x < rows * LINES; x += THREADS)
      prefetch((const u8*)v + (first_token + x / LINES) * (2 * v_pitch) + first_head * DIM * 2 + x % LINES * 128);
  }

  // ---- gates and the decays along the paths ----
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    if (my_row >= ROWS || head_of(i) >= HEADS) continue;
    HeadRows& head = small.head[head_of(i)];
    if (my_row < 0) continue;
    const float own_decay = is_tree ? log_decay(gate_value(my_a[i], gates_bf16), my_A[i], my_bias[i]) : 0.f;
    head.g[my_row] = own_decay;
    head.beta[my_row] = is_tree ? sigmoid(gate_value(my_b[i], gates_bf16)) : 0.f;
    if (head_of(i) == 0) small.mask[my_row] = mask, small.record[my_row] = tree_record;
    if (is_tree && share == 0) g_records[(record_base + tree_record) * value_heads + first_head + head_of(i)] = own_decay;
  }
  __syncthreads();
  for (u64 left = mask; left; left &= left - 1) {
    const int row = __ffsll(left) - 1;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) G[i] += rows_of(i).g[row];
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    if (my_row >= ROWS || head_of(i) >= HEADS) continue;
    const double scaled = 1.4426950408889634 * G[i];  // for powers of two
    const float first = (float)scaled;
    rows_of(i).G[16 - LOG_ROWS + tid % PLACES] = make_float2(first, (float)(scaled - first));
  }

  // ---- norms, when the keys are there ----
  copy_wait_all();
  publish_to_products();
  __syncthreads();
  {
    constexpr int SHARERS = THREADS / COLUMNS;  // threads of a row
    const int r = tid / SHARERS, part = tid % SHARERS * (CHUNKS / SHARERS);
    const float factor = r < ROWS ? 1.f : DIM == 128 ? 0.08838834764831845f : 0.125f;
    const float norm = sum_over<SHARERS>(norm_of<CHUNKS / SHARERS>(memory + part * KEY_PITCH + r * 16, KEY_PITCH));
    if (tid % SHARERS == 0) small.scale[r] = factor * rsqrtf(norm + norm_eps);
  }
  if (LOG_BLOCKS && !early) norms_of_log();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (my_row >= 0 && my_row < ROWS && head_of(i) < HEADS) {  // the barriers of the small matrices publish it
      HeadRows& head = small.head[head_of(i)];
      const float from_base = exp_near_one((float)G[i]), beta = head.beta[my_row];
      head.in[my_row] = make_float2(beta, beta * from_base * small.scale[my_row]);
      head.out[my_row] = from_base * small.scale[ROWS + my_row];
    }

  // ---- tiles of 64 value rows ----
#pragma unroll 1
  for (int n = 0; n < HEADS * TILES; n++) {
    const HeadRows& head = small.head[n / TILES];
    const bool first_of_head = n % TILES == 0;
    const u32 base = keys >> 4, v_row = anew(2 * v_pitch), out_row = anew(2 * value_heads * DIM);
    const u32 my_value = value + 2 * g;
    // v of the tree rows and u of log rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9, which are in the L2 cache by now.
    u32 values[ROWS / 8][2];
    logged_t logged[4];
    auto load_values = [&] {
      const u8* from = (const u8*)v + (first_token + 2 * t) * v_row + 2 * my_value;
#pragma unroll
      for (int i = 0; i < ROWS / 8; i++, from += 8 * (u64)v_row)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          values[i][e] = 0;
          if (8 * i + 2 * t + e < rows) values[i][e] = *(const u32*)(from + e * v_row);
        }
    };
    if (!LATE || !first_of_head) load_values();
    const bool folds = flush && !(early && n == 0);
    if (LOG_BLOCKS && length > 0 && (!LATE || !first_of_head || folds)) load_log(my_value, logged);
    u32 hi[K_STEPS][4], lo[STATE_BF16 ? 1 : K_STEPS][4];  // the tile as first operands
    copy_wait_all();
    __syncwarp();
    [[maybe_unused]] const u32 matrix = stage + ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (lane >> 4) * 16;
    // Keys 2 t, 2 t + 1 (i < 2) or 2 t + 8, 2 t + 9 of k-step j, of value row 2 g (i even) or 2 g + 1.
    [[maybe_unused]] auto two_keys = [&](int j, int i) {
      const int piece = 4 * j + (t >> 1) + 2 * (i >> 1);
      return (float2*)(own_stage + (2 * g + (i & 1)) * ROW_BYTES + (piece ^ (g & 3) << 1) * 16 + (t & 1) * 8);
    };
    if (!folds) {
#pragma unroll
      for (int j = 0; j < K_STEPS; j++) {
#if STATE_BF16
        load_matrix4(hi[j], matrix + 32 * j);
#else
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 x = *two_keys(j, i);
          split2(x.x, x.y, hi[j][i], lo[j][i]);
        }
#endif
      }
    } else {
      // Fold the log: S <- e^{G_h} S + sum_j fold_j u_j k_j^T, write it, go on with it.
      u32 part[3][4];
      const float whole = head.fold[16];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = 2 * t + 8 * i;
        const float wx = head.fold[r] * small.scale[COLUMNS + r], wy = head.fold[r + 1] * small.scale[COLUMNS + r + 1];
        const float2 x = floats_of(logged[2 * i]), y = floats_of(logged[2 * i + 1]);
        split(wx * x.x, wy * y.x, part[0][2 * i], part[1][2 * i], part[2][2 * i]);
        split(wx * x.y, wy * y.y, part[0][2 * i + 1], part[1][2 * i + 1], part[2][2 * i + 1]);
      }
      const u32 fold_keys = log_keys + (lane >> 4) * LOG_PITCH + (lane & 15) * 16;
      constexpr int AT_ONCE = STATE_BF16 || MIN_CTAS <= 2 ? 2 : 1;  // k-steps, as registers allow
#pragma unroll
      for (int pair = 0; pair < K_STEPS; pair += AT_ONCE) {
        float left[AT_ONCE][4] = {}, right[AT_ONCE][4] = {};
        u32 x[AT_ONCE][4];
#pragma unroll
        for (int odd = 0; odd < AT_ONCE; odd++) {
          load_matrix4_transposed(x[odd], fold_keys + 2 * (pair + odd) * LOG_PITCH);
#if STATE_BF16
          load_matrix4(hi[pair + odd], matrix + 32 * (pair + odd));
#endif
        }
#if STATE_BF16
        __syncwarp();  // every lane has read these keys of the tile
#endif
#pragma unroll
        for (int p = PARTS - 1; p >= 0; p--)
#pragma unroll
          for (int odd = 0; odd < AT_ONCE; odd++) {
            mma_in_order(left[odd], part[p], x[odd][0], x[odd][1]);
            mma_in_order(right[odd], part[p], x[odd][2], x[odd][3]);
          }
#pragma unroll
        for (int odd = 0; odd < AT_ONCE; odd++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int j = pair + odd;
            const float* more = (i < 2 ? left : right)[odd] + 2 * (i & 1);
#if STATE_BF16
            const u32 two = hi[j][i];
            hi[j][i] = pack_bf16(fmaf(whole, low_half(two), more[0]), fmaf(whole, high_half(two), more[1]));
            *(u32*)(own_stage + ((i & 1) * 8 + g) * ROW_BYTES + 32 * j + 16 * (i >> 1) + 4 * t) = hi[j][i];
#else
            float2 two = *two_keys(j, i);
            two = make_float2(fmaf(whole, two.x, more[0]), fmaf(whole, two.y, more[1]));
            *(float2*)(tile + (2 * g + (i & 1)) * DIM + 16 * j + 8 * (i >> 1) + 2 * t) = two;
            split2(two.x, two.y, hi[j][i], lo[j][i]);
#endif
          }
      }
#if STATE_BF16
      __syncwarp();
#pragma unroll
      for (int i = 0; i < DIM / 16; i++) {
        const int row = (32 * i + lane) / CHUNKS, piece = (32 * i + lane) % CHUNKS;
        *(uint4*)(tile + row * DIM + piece * 8) =
            *(const uint4*)(own_stage + ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + piece * 16);
      }
#endif
    }
    tile += 64 * DIM;
    __syncwarp();  // every lane has read the tile
    if (n + 1 < HEADS * TILES) copy_tile(stage, tile, lane);
    copy_commit();
    // S k and S q at first; 4 numbers for 8 tree rows.
    float both[MERGED ? ROWS : 1], u[BLOCKS][BLOCK / 2], o[BLOCKS][BLOCK / 2];
    auto of_keys = [&](int i) { return MERGED ? both + 4 * i : u[8 * i / BLOCK] + i % (BLOCK / 8) * 4; };
    auto of_queries = [&](int i) { return MERGED ? both + ROWS / 2 + 4 * i : o[8 * i / BLOCK] + i % (BLOCK / 8) * 4; };
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < K_STEPS; j++) {
      if constexpr (MERGED) {
        const u64 rows_of_both = operand(base, 2 * j * KEY_PITCH, KEY_PITCH);
        if (j == 0) multiply<false>(both, hi[0], rows_of_both);
        else multiply(both, hi[j], rows_of_both);
      } else {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
          const u64 of_keys = operand(base, 2 * j * KEY_PITCH + block * BLOCK * 16, KEY_PITCH);
          const u64 of_queries = operand(base, 2 * j * KEY_PITCH + (ROWS + block * BLOCK) * 16, KEY_PITCH);
          if (j == 0) {
            multiply<false>(u[block], hi[0], of_keys);
            multiply<false>(o[block], hi[0], of_queries);
          } else {
            multiply(u[block], hi[j], of_keys);
            multiply(o[block], hi[j], of_queries);
          }
          if (!STATE_BF16) multiply(u[block], lo[STATE_BF16 ? 0 : j], of_keys);
          if (!STATE_BF16) multiply(o[block], lo[STATE_BF16 ? 0 : j], of_queries);
        }
      }
    }
    warpgroup_commit();
    auto wait = [&] {
      warpgroup_wait();
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
        if (!MERGED) name_results(u[block]), name_results(o[block]);
      if (MERGED) name_results(both);
    };
    wait();

    if (first_of_head) {
      // ---- small matrices: Grams of [keys; queries] with the keys of the log and of the tree ----
      const u32 thread = anew(tid), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
      constexpr bool BOTH = ROWS == 64;  // a warp has keys and queries of its 16 rows, else one of them
      float gram[BOTH ? 2 : 1][ROWS / 2], log_gram[BOTH ? 2 : 1][8];
      warpgroup_begin();
#pragma unroll
      for (int j = 0; j < K_STEPS; j++)
#pragma unroll
        for (int kind = 0; kind < (BOTH ? 2 : 1); kind++) {
          const u64 x = operand(base, 2 * j * KEY_PITCH + kind * ROWS * 16, KEY_PITCH);
          const u64 of_tree = operand(base, 2 * j * KEY_PITCH, KEY_PITCH);
          const u64 of_log = operand(base, LOG_AT + 2 * j * LOG_PITCH, LOG_PITCH);
          if (j == 0) multiply<false>(gram[kind], x, of_tree);
          else multiply<true>(gram[kind], x, of_tree);
          if (LOG_BLOCKS && j == 0) multiply<false>(log_gram[kind], x, of_log);
          else if (LOG_BLOCKS) multiply<true>(log_gram[kind], x, of_log);
        }
      warpgroup_commit();
      warpgroup_wait();
#pragma unroll
      for (int kind = 0; kind < (BOTH ? 2 : 1); kind++) {
        name_results(gram[kind]);
        if (LOG_BLOCKS) name_results(log_gram[kind]);
      }
      if (n > 0) __syncthreads();  // all warps have done with the matrices of the head before
      const int first_row = warp * 16 % ROWS;
      const bool is_query = warp * 16 >= ROWS;
      float C[ROWS / 2];
      if (BOTH || warp * 16 < COLUMNS) {
        float2 row_G[2];
        float factor[2][2];  // beta / |k| and DIM^-0.5 / |q|
        mask_t seen[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = first_row + g + 8 * e;
          row_G[e] = head.G[16 + row];
          factor[e][0] = head.beta[row] * small.scale[row], factor[e][1] = small.scale[ROWS + row];
          seen[e] = small.mask[row] >> (2 * t);
        }
        // Decays from two columns of the system to two rows, over the columns' |k|; without meaning where a row does not see
        // a column.
        auto decayed = [&](int column, int scale, float (&w)[2][2]) {
          const float4 G = *(const float4*)&head.G[column];
          const float2 key = *(const float2*)&small.scale[scale];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            w[e][0] = key.x * power_of_two((row_G[e].x - G.x) + (row_G[e].y - G.y));
            w[e][1] = key.y * power_of_two((row_G[e].x - G.z) + (row_G[e].y - G.w));
          }
        };
        if (LOG_BLOCKS && sees_log) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float w[2][2];
            decayed(8 * half + 2 * t, COLUMNS + 8 * half + 2 * t, w);
#pragma unroll
            for (int kind = 0; kind < (BOTH ? 2 : 1); kind++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const bool query = BOTH ? kind : is_query;
                const float f = query ? factor[e][1] : -factor[e][0];
                u32 hi, lo;
                split2(f * w[e][0] * log_gram[kind][4 * half + 2 * e], f * w[e][1] * log_gram[kind][4 * half + 2 * e + 1], hi, lo);
                u8* to = memory + W_AT + half * W_PITCH + ((query ? ROWS : 0) + first_row + g + 8 * e) * 16 + 4 * t;
                *(u32*)to = hi, *(u32*)(to + W_BYTES) = lo;
              }
          }
        }
#pragma unroll
        for (int other = 0; other < ROWS / 16; other++) {  // 16 columns
          const int block = other * 16 / BLOCK;
          const bool below = other * 16 <= first_row;  // not above the diagonal
          if (!below && first_row / BLOCK != block) continue;
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int i = 2 * other + half, column = 8 * i + 2 * t;
            float w[2][2] = {};
            if (below) decayed(16 + column, column, w);
#pragma unroll
            for (int kind = 0; kind < (BOTH ? 2 : 1); kind++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const int row = first_row + g + 8 * e;
                const bool query = BOTH ? kind : is_query;
                const float f = query ? factor[e][1] : factor[e][0];
                const u32 bits = (u32)(seen[e] >> (8 * i));
                const float x = bits & 1 && (query || row != column) ? f * w[e][0] * gram[kind][4 * i + 2 * e] : 0.f;
                const float y = bits & 2 && (query || row != column + 1) ? f * w[e][1] * gram[kind][4 * i + 2 * e + 1] : 0.f;
                u32 hi, lo, least;
                if (MERGED && query) {
                  C[4 * i + 2 * e] = x, C[4 * i + 2 * e + 1] = y;
                } else if (query) {
                  split2(x, y, hi, lo);
                  u8* to = memory + c_at(block) + (i % (BLOCK / 8)) * c_pitch(block) + (row - block * BLOCK) * 16 + 4 * t;
                  *(u32*)to = hi, *(u32*)(to + c_bytes(block)) = lo;
                } else if (first_row / BLOCK == block) {
                  if (below)
                    *(float2*)(memory + T_AT + block * BLOCK_BYTES +
                               4 * (row % BLOCK * SCRATCH_PITCH + column % BLOCK)) = make_float2(x, y);
                } else {
                  split3(-x, -y, hi, lo, least);
                  u8* to = memory + L_AT + i * (BLOCK * 16) + (row % BLOCK) * 16 + 4 * t;
                  *(u32*)to = hi, *(u32*)(to + L_BYTES) = lo;
                  if (L_PARTS == 3) *(u32*)(to + 2 * L_BYTES) = least;
                }
              }
          }
        }
      }
      __syncthreads();
      make_inverses(memory, thread, C, [&](int first, int count) {
        // Records of the keys; what they overwrite is no log row of this launch.
        if (blockIdx.x == 0 && n == 0) {
          const u32 chunk = thread % CHUNKS, key_bytes = anew(key_heads) * DIM * 2;
          for (int row = (thread - first) / CHUNKS; row < rows; row += count / CHUNKS)
            *(uint4*)((u8*)k_records + ((record_base + small.record[row]) * key_bytes + key_head * DIM * 2 + chunk * 16)) =
                *(const uint4*)(memory + chunk * KEY_PITCH + row * 16);
        }
      });
      publish_to_products();
      __syncthreads();
    }

    if (LATE && first_of_head) {
      load_values();
      if (sees_log) load_log(my_value, logged);
    }
    // ---- right-hand sides and what S gives the outputs ----
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
      const float4 in = *(const float4*)&head.in[8 * i + 2 * t];
      const float2 out = *(const float2*)&head.out[8 * i + 2 * t];
      float *x = of_keys(i), *y = of_queries(i);
      x[0] = fmaf(in.x, low_half(values[i][0]), -in.y * x[0]);
      x[1] = fmaf(in.z, low_half(values[i][1]), -in.w * x[1]);
      x[2] = fmaf(in.x, high_half(values[i][0]), -in.y * x[2]);
      x[3] = fmaf(in.z, high_half(values[i][1]), -in.w * x[3]);
      y[0] *= out.x, y[1] *= out.y, y[2] *= out.x, y[3] *= out.y;
    }
    // ---- the log's share of both ----
    if (LOG_BLOCKS && sees_log) {
      u32 log_hi[4], log_mid[4], log_lo[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
#if LOG_BF16  // exact in one part
        log_hi[2 * i] = __byte_perm(logged[2 * i], logged[2 * i + 1], 0x5410);
        log_hi[2 * i + 1] = __byte_perm(logged[2 * i], logged[2 * i + 1], 0x7632);
#else
        const float2 x = logged[2 * i], y = logged[2 * i + 1];
        split3(x.x, y.x, log_hi[2 * i], log_mid[2 * i], log_lo[2 * i]);
        split3(x.y, y.y, log_hi[2 * i + 1], log_mid[2 * i + 1], log_lo[2 * i + 1]);
#endif
      }
      warpgroup_begin();
      if constexpr (MERGED) {
        const u64 w_hi = operand(base, W_AT, W_PITCH), w_lo = operand(base, W_AT + W_BYTES, W_PITCH);
        if (!LOG_BF16) {
          multiply(both, log_lo, w_hi);
          multiply(both, log_mid, w_lo);
          multiply(both, log_mid, w_hi);
        }
        multiply(both, log_hi, w_lo);
        multiply(both, log_hi, w_hi);
      } else {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
          const int L = W_AT + block * BLOCK * 16, C = L + ROWS * 16;
          if (!LOG_BF16) {
            multiply(u[block], log_lo, operand(base, L, W_PITCH));
            multiply(o[block], log_mid, operand(base, C, W_PITCH));
            multiply(u[block], log_mid, operand(base, L + W_BYTES, W_PITCH));
            multiply(u[block], log_mid, operand(base, L, W_PITCH));
          }
          multiply(o[block], log_hi, operand(base, C + W_BYTES, W_PITCH));
          multiply(o[block], log_hi, operand(base, C, W_PITCH));
          multiply(u[block], log_hi, operand(base, L + W_BYTES, W_PITCH));
          multiply(u[block], log_hi, operand(base, L, W_PITCH));
        }
      }
      warpgroup_commit();
      wait();
    }
    auto store_records = [&](int block) {
      u8* to = (u8*)u_records + (record_base * record_bytes + my_value * (u32)sizeof(log_t));
#pragma unroll
      for (int i = 0; i < BLOCK / 8; i++) {
        const int row = block * BLOCK + 8 * i + 2 * t;
        const int2 record = *(const int2*)&small.record[row];
        u8 *first = to + record.x * record_bytes, *second = to + record.y * record_bytes;
        const float* x = of_keys(block * BLOCK / 8 + i);
        if (row < rows) store_u((log_t*)first, x[0], x[2]);
        if (row + 1 < rows) store_u((log_t*)second, x[1], x[3]);
      }
    };
    if constexpr (MERGED) {
      // ---- u = R + (T - I) R, o += C T R ----
      u32 hi[STEPS][4], mid[STEPS][4], lo[STEPS][4];
#pragma unroll
      for (int s = 0; s < STEPS; s++) split_columns(both, 8 * s, hi[s], mid[s], lo[s]);
      warpgroup_begin();
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const int T = T_AT + 2 * s * T_PITCH;
        const u64 t_hi = operand(base, T, T_PITCH), t_mid = operand(base, T + T_BYTES, T_PITCH);
        if (PARTS == 3) {
          multiply(both, lo[s], t_hi);
          multiply(both, hi[s], operand(base, T + 2 * T_BYTES, T_PITCH));
          multiply(both, mid[s], t_mid);
        }
        multiply(both, mid[s], t_hi);
        multiply(both, hi[s], t_mid);
        multiply(both, hi[s], t_hi);
      }
      warpgroup_commit();
      wait();
      store_records(0);
    } else {
      // ---- solve block by block, outputs on the way ----
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        u32 hi[STEPS][4], mid[STEPS][4], lo[STEPS][4];
#pragma unroll
        for (int s = 0; s < STEPS; s++) split_columns(u[block], 8 * s, hi[s], mid[s], lo[s]);
        warpgroup_begin();
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          const int T = T_AT + block * BLOCK_BYTES + 2 * s * T_PITCH;
          const u64 t_hi = operand(base, T, T_PITCH), t_mid = operand(base, T + T_BYTES, T_PITCH);
          if (PARTS == 3) {
            multiply(u[block], lo[s], t_hi);
            multiply(u[block], hi[s], operand(base, T + 2 * T_BYTES, T_PITCH));
            multiply(u[block], mid[s], t_mid);
          }
          multiply(u[block], mid[s], t_hi);
          multiply(u[block], hi[s], t_mid);
          multiply(u[block], hi[s], t_hi);
        }
        warpgroup_commit();
        wait();
#pragma unroll
        for (int s = 0; s < STEPS; s++) split_columns(u[block], 8 * s, hi[s], mid[s], lo[s]);
        warpgroup_begin();
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          if (block + 1 < BLOCKS) {
            const int L = L_AT + 2 * s * BLOCK * 16;
            const u64 l_hi = operand(base, L, BLOCK * 16), l_lo = operand(base, L + L_BYTES, BLOCK * 16);
            float(&later)[BLOCK / 2] = u[BLOCKS - 1];
            if (PARTS == 3) multiply(later, lo[s], l_hi);
            if (L_PARTS == 3) multiply(later, hi[s], operand(base, L + 2 * L_BYTES, BLOCK * 16));
            if (PARTS == 3) multiply(later, mid[s], l_lo);
            multiply(later, mid[s], l_hi);
            multiply(later, hi[s], l_lo);
            multiply(later, hi[s], l_hi);
          }
#pragma unroll
          for (int later = block; later < BLOCKS; later++) {
            const int C = c_at(block) + 2 * s * c_pitch(block) + (later - block) * BLOCK * 16;
            const u64 c_hi = operand(base, C, c_pitch(block));
            multiply(o[later], mid[s], c_hi);
            multiply(o[later], hi[s], operand(base, C + c_bytes(block), c_pitch(block)));
            multiply(o[later], hi[s], c_hi);
          }
        }
        warpgroup_commit();
        store_records(block);
        wait();
      }
    }
    u8* to = (u8*)output + (first_token + 2 * t) * out_row + 2 * my_value;
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++, to += 7 * (u64)out_row) {
      const float* y = of_queries(i);
      const u32 first = pack_bf16(y[0], y[2]), second = pack_bf16(y[1], y[3]);
      if (8 * i + 2 * t < rows) *(u32*)to = first;
      to += out_row;
      if (8 * i + 2 * t + 1 < rows) *(u32*)to = second;
    }
    value += 64;
  }
}
