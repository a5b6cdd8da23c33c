// Tree verification of 16 to 64 rows over a dense state and a log of at most 16 committed rows: products of warpgroups.
//
// Computes what verify.cu computes (the equations are there). A CTA is one warpgroup; it takes one value head of one
// request, or a share of its value rows, and goes over tiles of 64 value rows x DIM keys of S. All large products are
// wgmma: 64 value rows are the rows of the product, tree rows its columns, the second operand lies in shared memory.
// With a second operand of up to 128 columns one instruction does what sixteen of mma.sync do, none of them with loads of
// its own; that pays where there are many tree rows.
//
// Rows and columns. A warp owns 16 value rows of a tile; lane 4 g + t holds value rows 2 g and 2 g + 1 (rows g and g + 8 of
// the product) and tree rows 8 i + 2 t and 8 i + 2 t + 1. S is the first operand, from registers: fp32 as bf16 hi + lo,
// bf16 as it is. The results are first operands of the next product as they stand: nothing moves between lanes.
//
// The system. Rows stand in blocks of 32 (16 if there are only 16). T = (I + L)^-1 of each block is made in fp32, a lane
// per column. With R = beta v - beta e^G S k - L_log u_log, block by block:
//     u_b = R_b + (T_b - I) R_b,   R_later -= L u_b,   o += C u_b
// R and u enter in three bf16 parts (24 bits), T in three, L in two (three on long paths), C in two.
//
// Shared memory. Second operands are blocks of 8 rows x 16 bytes ("core matrices", no swizzle), 16-byte columns of all
// rows one after another: keys and queries come there by asynchronous copies of 16 bytes. Then: keys of the log, a state
// tile and u of the log for each warp, the small matrices, `Small`.
// Pipeline. The copy of the next tile starts when this one is in registers. The first tile meets the keys before the small
// matrices are made. Two to four CTAs of a multiprocessor are at different points of their lives.
// Traffic and flushes: as verify.cu; a flush folds with mma.sync. wgmma exists on sm_90a only; verify.cu is for the rest.
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
#ifndef MIN_CTAS
#define MIN_CTAS 2
#endif
constexpr int THREADS = 128;
constexpr int BLOCK = ROWS < 32 ? ROWS : 32, BLOCKS = ROWS / BLOCK, STEPS = BLOCK / 16;  // k-steps of a block
constexpr int LOG_ROWS = LOG_BLOCKS ? 16 : 0, SYSTEM = LOG_ROWS + ROWS;                  // rows of the system
constexpr int COLUMNS = 2 * ROWS;                                                        // keys, then queries
constexpr int CHUNKS = DIM / 8;                                                          // of 16 bytes in a key

// ---- shared memory, in bytes; *_PITCH is from one 16-byte column to the next ----
constexpr int KEY_PITCH = COLUMNS * 16 + 16, KEY_BYTES = CHUNKS * KEY_PITCH;  // the odd 16 bytes spread the banks
constexpr int LOG_PITCH = 16 * 16 + 16, LOG_BYTES = LOG_BLOCKS ? CHUNKS * LOG_PITCH : 0;
// A warp's tile. fp32: rows of 16-byte pieces that change places against bank conflicts. bf16: rows padded by 16 bytes, first
// the even ones, then the odd ones, as load_matrix4 wants them.
constexpr int ROW_BYTES = DIM * (int)sizeof(state_t) + (STATE_BF16 ? 16 : 0), STAGE_BYTES = 16 * ROW_BYTES;
constexpr int U_PITCH = 16 * (int)sizeof(log_t), SIDE_BYTES = LOG_ROWS * U_PITCH;  // u of the log for a warp's tile
constexpr int T_PITCH = BLOCK * 16 + 32, T_BYTES = BLOCK / 8 * T_PITCH, T_PARTS = 3;
constexpr int SCRATCH_PITCH = BLOCK + 8;  // of L in fp32, where T will be
static_assert(BLOCK * SCRATCH_PITCH * 4 <= T_PARTS * T_BYTES, "scratch");
constexpr int L_BYTES = BLOCKS > 1 ? BLOCK * BLOCK * 2 : 0;                 // one part of L of the second block's rows
DEVICE constexpr int c_pitch(int block) { return (ROWS - block * BLOCK) * 16; }
DEVICE constexpr int c_bytes(int block) { return BLOCK / 8 * c_pitch(block); }  // one part of C of a block's columns
constexpr int W_PITCH = COLUMNS * 16, W_BYTES = LOG_BLOCKS ? 2 * W_PITCH : 0;   // one part of [-L_log; C_log]

constexpr int LOG_AT = KEY_BYTES, STAGES_AT = LOG_AT + LOG_BYTES, SIDES_AT = STAGES_AT + 4 * STAGE_BYTES;
constexpr int T_AT = SIDES_AT + 4 * SIDE_BYTES, L_AT = T_AT + BLOCKS * T_PARTS * T_BYTES, C_AT = L_AT + L_PARTS * L_BYTES;
constexpr int W_AT = C_AT + 2 * (c_bytes(0) + (BLOCKS > 1 ? c_bytes(BLOCKS - 1) : 0)), SMALL_AT = W_AT + 2 * W_BYTES;
DEVICE constexpr int c_at(int block) { return C_AT + (block ? 2 * c_bytes(0) : 0); }

struct Small {
  u64 mask[ROWS];
  float2 G[SYSTEM];           // log decay from the base as a sum of two floats, log rows first
  float2 in[ROWS];            // beta, beta e^G / |k|
  float key_scale[SYSTEM];    // 1 / |k|
  float row_factor[COLUMNS];  // beta / |k|, then DIM^-0.5 / |q|
  float out[ROWS];            // e^G DIM^-0.5 / |q|
  float g[SYSTEM];
  u32 place[ROWS];            // where u of a tree row starts, in bytes
  float fold[16 + 4];         // weights of a flush, e^{G_h - G_j} / |k_j|; then e^{G_h}
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

#define F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F8 F4(0), F4(4)
#define F16 F8, F4(8), F4(12)
#define F32 F16, F4(16), F4(20), F4(24), F4(28)
#define P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define P16 P8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define P32 P16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {"

// c[64 x N] += a[64 x 16] b[N x 16]^T, a in registers.
template <int HALF>
DEVICE void multiply(float (&c)[HALF], const u32 (&a)[4], u64 b) {
#define A_AND_B "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
  if constexpr (HALF == 8)
    asm volatile(WGMMA(16) P8 "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;" : F8 : A_AND_B);
  else
    asm volatile(WGMMA(32) P16 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;" : F16 : A_AND_B);
#undef A_AND_B
}

// c[64 x N] += a[64 x 16] b[N x 16]^T, both in shared memory.
template <int HALF>
DEVICE void multiply(float (&c)[HALF], u64 a, u64 b) {
  if constexpr (HALF == 8)
    asm volatile(WGMMA(16) P8 "}, %8, %9, 1, 1, 1, 0, 0;" : F8 : "l"(a), "l"(b));
  else if constexpr (HALF == 16)
    asm volatile(WGMMA(32) P16 "}, %16, %17, 1, 1, 1, 0, 0;" : F16 : "l"(a), "l"(b));
  else
    asm volatile(WGMMA(64) P32 "}, %32, %33, 1, 1, 1, 0, 0;" : F32 : "l"(a), "l"(b));
}

// 16 columns of a result from element `at` on, as a first operand in three parts.
template <int SIZE>
DEVICE void split_columns(const float (&c)[SIZE], int at, u32 (&hi)[4], u32 (&mid)[4], u32 (&lo)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) split3(c[at + 2 * i], c[at + 2 * i + 1], hi[i], mid[i], lo[i]);
}

// 16 bytes, or zeros.
DEVICE void copy_async16_or_zero(u32 shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

DEVICE int u_place(int r, int p) { return r * U_PITCH + ((LOG_BF16 ? p : p ^ (r >> 1 & 3)) << 4); }

DEVICE void copy_tile(u32 stage, const state_t* tile, int lane) {
  constexpr int PIECES = DIM * (int)sizeof(state_t) / 16;  // of a row
#pragma unroll
  for (int i = 0; i < PIECES / 2; i++) {
    const int row = (32 * i + lane) / PIECES, piece = (32 * i + lane) % PIECES;
    const int place = STATE_BF16 ? ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + piece * 16
                                 : row * ROW_BYTES + (piece ^ (row >> 1 & 3) << 1) * 16;
    copy_async16(stage + place, (const u8*)(tile + row * DIM) + piece * 16);
  }
}

// |x|^2 of a row of bf16 in 16-byte columns.
DEVICE float norm_of(const u8* row, int pitch) {
  float sum = 0.f;
#pragma unroll 4
  for (int i = 0; i < CHUNKS; i++) sum += sum_of_squares(*(const uint4*)(row + i * pitch));
  return sum;
}

// grid: (value heads x shares of their value rows, requests)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify_wide(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
            int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
            const float* __restrict__ A_log, const float* __restrict__ dt_bias, const u64* __restrict__ masks,
            int mask_pitch, state_t* state, const int* __restrict__ slots, log_t* u_records, u16* k_records,
            float* g_records, int record_rows, const int* __restrict__ log_length, const int* __restrict__ row_list,
            u16* __restrict__ output, int rows, int key_heads, int value_heads, int value_shares, int capacity,
            int reserve, float norm_eps) {
  const int request = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, t = lane & 3;
  const int value_head = blockIdx.x / value_shares, share = blockIdx.x % value_shares;
  const int group = value_heads / key_heads, key_head = value_head / group;

  extern __shared__ __align__(128) u8 memory[];
  const u32 keys = shared_address(memory), log_keys = keys + LOG_AT;
  const u32 stage = keys + STAGES_AT + warp * STAGE_BYTES, side = keys + SIDES_AT + warp * SIDE_BYTES;
  Small& small = *(Small*)(memory + SMALL_AT);

  // ---- first wave of loads: keys and queries, cursors, gates ----
  const i64 record_base = (i64)request * record_rows;
  const int first_token = request * rows;
  const int slot = slots[request];
  int length = 0, log_record = 0;
  if (LOG_BLOCKS) {
    length = min(log_length[request], LOG_ROWS);
    if (lane < min(record_rows, LOG_ROWS)) log_record = row_list[record_base + lane];
  }
  constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;
  const int chunk = tid % CHUNKS;
#pragma unroll 8
  for (int i = 0; i < COLUMNS / ROWS_AT_ONCE; i++) {
    const int column = tid / CHUNKS + i * ROWS_AT_ONCE, row = column % ROWS;
    const int from = first_token + min(row, rows - 1);
    copy_async16_or_zero(keys + chunk * KEY_PITCH + column * 16,
                         (column < ROWS ? k + (i64)from * k_pitch : q + (i64)from * q_pitch) + key_head * DIM + chunk * 8,
                         row < rows);
  }
  // Threads stand for rows of the system: the log's, then the tree's.
  const int my_row = tid - LOG_ROWS;
  const bool is_tree = my_row >= 0 && my_row < rows;
  u64 mask = 0;
  float my_a = 0.f, my_b = 0.f, my_A = 0.f, my_bias = 0.f;
  if (is_tree) {
    const i64 index = (i64)(first_token + my_row) * value_heads + value_head;
    mask = masks[(i64)request * mask_pitch + my_row];
    my_a = load_gate(a, index, gates_bf16), my_b = load_gate(b, index, gates_bf16);
    my_A = A_log[value_head], my_bias = dt_bias[value_head];
  }
  {
    constexpr int LINES = DIM / 64;  // 128-byte lines of one value row of v
    for (int x = tid; x < rows * LINES; x += THREADS)
      prefetch(v + (i64)(first_token + x / LINES) * v_pitch + value_head * DIM + x % LINES * 64);
  }
  if (slot < 0) return;

  // ---- second wave: rows of the log, the first tile ----
  const bool flush = LOG_BLOCKS && length > 0 && length + reserve > capacity;
  const bool sees_log = LOG_BLOCKS && length > 0 && !flush;
  const u32 record_bytes = value_heads * DIM * (u32)sizeof(log_t);  // u of one row
  const int tiles = DIM / 64 / value_shares;
  u32 value = value_head * DIM + share * (DIM / value_shares) + warp * 16;  // this warp's first value row, of all heads
  state_t* tile = state + ((i64)slot * value_heads * DIM + value) * DIM;
  constexpr int U_PIECES = (int)sizeof(log_t), U_COPIES = LOG_BLOCKS ? U_PIECES / 2 : 1;  // pieces of a row; copies of a lane
  u32 u_from[U_COPIES] = {};
  int tree_record = my_row;
  float log_g = 0.f;
  if (LOG_BLOCKS) {
#pragma unroll
    for (int i = 0; i < LOG_ROWS / ROWS_AT_ONCE; i++) {
      const int r = tid / CHUNKS + i * ROWS_AT_ONCE, from = __shfl_sync(0xffffffffu, log_record, r & 15);
      copy_async16_or_zero(log_keys + chunk * LOG_PITCH + r * 16,
                           k_records + ((record_base + from) * key_heads + key_head) * DIM + chunk * 8, r < length);
    }
    if (tid < length) log_g = g_records[(record_base + log_record) * value_heads + value_head];
    if (is_tree) tree_record = row_list[record_base + length + my_row];
  }
  copy_commit();
  copy_tile(stage, tile, lane);
  auto copy_side = [&] {  // u of the log; rows that are not there stand for the first: their factors are zero
    if (LOG_BLOCKS && length > 0) {
#pragma unroll
      for (int i = 0; i < U_COPIES; i++) {
        const int r = (lane + 32 * i) / U_PIECES, p = lane % U_PIECES;
        copy_async16(side + u_place(r, p), (const u8*)u_records + u_from[i]);
        u_from[i] += 64 * (u32)sizeof(log_t);
      }
    }
  };
  if (LOG_BLOCKS) {
#pragma unroll
    for (int i = 0; i < U_COPIES; i++) {
      const int r = (lane + 32 * i) / U_PIECES;
      u_from[i] = (u32)(record_base + __shfl_sync(0xffffffffu, log_record, r < length ? r : 0)) * record_bytes +
                  value * (u32)sizeof(log_t) + lane % U_PIECES * 16;
    }
  }
  copy_side();
  copy_commit();

  // ---- gates; then, when the keys are there, decays along the paths, norms and what follows from them ----
  const float beta = is_tree ? sigmoid(my_b) : 0.f, own_decay = is_tree ? log_decay(my_a, my_A, my_bias) : log_g;
  if (tid < SYSTEM) small.g[tid] = own_decay;
  copy_wait<1>();
  publish_to_products();
  __syncthreads();
  if (tid < SYSTEM) {
    double G = 0.0;
    if (LOG_BLOCKS && (my_row < 0 || !flush)) {
      const int last = my_row < 0 ? min(tid + 1, length) : length;
      for (int i = 0; i < last; i++) G += (double)small.g[i];
    }
    for (u64 left = is_tree ? mask : 0; left; left &= left - 1) G += (double)small.g[LOG_ROWS + __ffsll(left) - 1];
    const float first = (float)G;
    small.G[tid] = make_float2(first, (float)(G - first));
    const u8* own = memory + (my_row < 0 ? LOG_AT + tid * 16 : my_row * 16);
    const float key_scale = rsqrtf(norm_of(own, my_row < 0 ? LOG_PITCH : KEY_PITCH) + norm_eps);
    small.key_scale[tid] = key_scale;
    if (my_row >= 0) {
      const float query_scale = (DIM == 128 ? 0.08838834764831845f : 0.125f) *
                                rsqrtf(norm_of(memory + (ROWS + my_row) * 16, KEY_PITCH) + norm_eps);
      const float from_base = exp_near_one(first);
      small.mask[my_row] = mask;
      small.in[my_row] = make_float2(beta, beta * from_base * key_scale);
      small.row_factor[my_row] = beta * key_scale, small.row_factor[ROWS + my_row] = query_scale;
      small.out[my_row] = from_base * query_scale;
      small.place[my_row] = (u32)(record_base + tree_record) * record_bytes;
      if (is_tree && share == 0) g_records[(record_base + tree_record) * value_heads + value_head] = own_decay;
    } else if (LOG_BLOCKS && flush) {
      double whole = G;
      for (int i = tid + 1; i < length; i++) whole += (double)small.g[i];
      small.fold[tid] = tid < length ? __expf((float)(whole - G)) * key_scale : 0.f;
      if (tid == 0) small.fold[16] = exp_near_one((float)whole);
    }
  }
  __syncthreads();

  // ---- tiles of 64 value rows ----
  for (int n = 0; n < tiles; n++) {
    const u32 base = anew(keys >> 4), row_pitch = anew(2 * v_pitch), out_pitch = anew(2 * value_heads * DIM);
    u32 values[ROWS / 8][2];
    const u32 my_value = value + 2 * g;
    {
      const u32 v_offset = (u32)first_token * row_pitch + 2 * my_value;
#pragma unroll
      for (int i = 0; i < ROWS / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = 8 * i + 2 * t + e;
          values[i][e] = row < rows ? *(const u32*)((const u8*)v + (v_offset + row * row_pitch)) : 0u;
        }
    }
    float u[BLOCKS][BLOCK / 2] = {}, o[BLOCKS][BLOCK / 2] = {};  // S k and S q at first; 4 numbers for 8 tree rows
    copy_wait_all();
    __syncwarp();
    {
      u32 part[3][4];
      float whole = 0.f;
      auto logged = [&](int i) {  // u of log row 2 t, 2 t + 1, 2 t + 8 or 2 t + 9
        const int r = 2 * t + (i & 1) + 8 * (i >> 1), byte = 2 * g * (int)sizeof(log_t);
        return load_u((const log_t*)(memory + SIDES_AT + warp * SIDE_BYTES + u_place(r, byte >> 4) + (byte & 15)));
      };
      if (LOG_BLOCKS && flush) {
        whole = small.fold[16];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 w = *(const float2*)&small.fold[2 * t + 8 * i];
          const float2 x = logged(2 * i), y = logged(2 * i + 1);
          split3(w.x * x.x, w.y * y.x, part[0][2 * i], part[1][2 * i], part[2][2 * i]);
          split3(w.x * x.y, w.y * y.y, part[0][2 * i + 1], part[1][2 * i + 1], part[2][2 * i + 1]);
        }
      }
      const u32 fold_keys = log_keys + (lane >> 4) * LOG_PITCH + (lane & 15) * 16;
      u8* own_stage = memory + STAGES_AT + warp * STAGE_BYTES;
      [[maybe_unused]] const u32 matrix = stage + ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (lane >> 4) * 16;
      u32 hi[K_STEPS][4], lo[STATE_BF16 ? 1 : K_STEPS][4];
#pragma unroll
      for (int j = 0; j < K_STEPS; j++) {
#if STATE_BF16
        load_matrix4(hi[j], matrix + 32 * j);
        if (LOG_BLOCKS && flush) {
          float left[4] = {}, right[4] = {};
          u32 x[4];
          load_matrix4_transposed(x, fold_keys + 2 * j * LOG_PITCH);
#pragma unroll
          for (int p = 2; p >= 0; p--) mma(left, part[p], x[0], x[1]), mma(right, part[p], x[2], x[3]);
          __syncwarp();  // every lane has read these keys of the tile
#pragma unroll
          for (int i = 0; i < 2; i++) {
            hi[j][i] = pack_bf16(fmaf(whole, low_half(hi[j][i]), left[2 * i]), fmaf(whole, high_half(hi[j][i]), left[2 * i + 1]));
            hi[j][2 + i] = pack_bf16(fmaf(whole, low_half(hi[j][2 + i]), right[2 * i]),
                                     fmaf(whole, high_half(hi[j][2 + i]), right[2 * i + 1]));
            *(u32*)(own_stage + (i * 8 + g) * ROW_BYTES + 32 * j + 4 * t) = hi[j][i];
            *(u32*)(own_stage + (i * 8 + g) * ROW_BYTES + 32 * j + 16 + 4 * t) = hi[j][2 + i];
          }
        }
#else
        float s[8];  // value row 2 g: keys 2 t, 2 t + 1; row 2 g + 1: the same; then 8 keys on
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int piece = 4 * j + (t >> 1) + 2 * (i >> 1);
          const float2 x = *(const float2*)(own_stage + (2 * g + (i & 1)) * ROW_BYTES + (piece ^ (g & 3) << 1) * 16 + (t & 1) * 8);
          s[2 * i] = x.x, s[2 * i + 1] = x.y;
        }
        if (LOG_BLOCKS && flush) {
          float left[4] = {}, right[4] = {};
          u32 x[4];
          load_matrix4_transposed(x, fold_keys + 2 * j * LOG_PITCH);
#pragma unroll
          for (int p = 2; p >= 0; p--) mma(left, part[p], x[0], x[1]), mma(right, part[p], x[2], x[3]);
#pragma unroll
          for (int i = 0; i < 4; i++) s[i] = fmaf(whole, s[i], left[i]), s[4 + i] = fmaf(whole, s[4 + i], right[i]);
#pragma unroll
          for (int i = 0; i < 4; i++)
            *(float2*)(tile + (2 * g + (i & 1)) * DIM + 16 * j + 8 * (i >> 1) + 2 * t) = make_float2(s[2 * i], s[2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) split2(s[2 * i], s[2 * i + 1], hi[j][i], lo[j][i]);
#endif
      }
      warpgroup_begin();
#pragma unroll
      for (int j = 0; j < K_STEPS; j++) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
          const u64 of_keys = operand(base, 2 * j * KEY_PITCH + block * BLOCK * 16, KEY_PITCH);
          const u64 of_queries = operand(base, 2 * j * KEY_PITCH + (ROWS + block * BLOCK) * 16, KEY_PITCH);
          multiply(u[block], hi[j], of_keys);
          multiply(o[block], hi[j], of_queries);
          if (!STATE_BF16) multiply(u[block], lo[STATE_BF16 ? 0 : j], of_keys);
          if (!STATE_BF16) multiply(o[block], lo[STATE_BF16 ? 0 : j], of_queries);
        }
      }
      warpgroup_commit();
#if STATE_BF16
      if (LOG_BLOCKS && flush) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
          constexpr int PIECES = DIM / 8;
          const int row = (32 * i + lane) / PIECES, piece = (32 * i + lane) % PIECES;
          *(uint4*)(tile + row * DIM + piece * 8) =
              *(const uint4*)(own_stage + ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + piece * 16);
        }
      }
#endif
    }
    u32 log_hi[4], log_mid[4], log_lo[4];
    if (sees_log) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int byte = 2 * g * (int)sizeof(log_t);
        float2 x[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
          x[e] = load_u((const log_t*)(memory + SIDES_AT + warp * SIDE_BYTES + u_place(2 * t + e + 8 * i, byte >> 4) + (byte & 15)));
        split3(x[0].x, x[1].x, log_hi[2 * i], log_mid[2 * i], log_lo[2 * i]);
        split3(x[0].y, x[1].y, log_hi[2 * i + 1], log_mid[2 * i + 1], log_lo[2 * i + 1]);
      }
    }
    tile += 64 * DIM;
    __syncwarp();  // every lane has read the tile and u of the log
    if (n + 1 < tiles) {
      copy_tile(stage, tile, lane);
      copy_side();
      copy_commit();
    }
    auto wait = [&] {
      warpgroup_wait();
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) name_results(u[block]), name_results(o[block]);
    };
    wait();

    if (n == 0) {
      // ---- small matrices: Grams of [keys; queries] with the keys of the log and of the tree ----
      const u32 thread = anew(tid), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
      for (int first = 0; first < COLUMNS; first += 64) {
        float gram[ROWS / 2] = {}, log_gram[8] = {};
        warpgroup_begin();
#pragma unroll
        for (int j = 0; j < K_STEPS; j++) {
          const u64 x = operand(base + first, 2 * j * KEY_PITCH, KEY_PITCH);
          multiply(gram, x, operand(base, 2 * j * KEY_PITCH, KEY_PITCH));
          if (LOG_BLOCKS) multiply(log_gram, x, operand(base, LOG_AT + 2 * j * LOG_PITCH, LOG_PITCH));
        }
        warpgroup_commit();
        warpgroup_wait();
        name_results(gram);
        name_results(log_gram);
        const int place = first + warp * 16;  // the warp's first row, of keys and queries
        if (place >= COLUMNS) continue;
        const bool is_query = place >= ROWS;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = place % ROWS + g + 8 * e;
          const float factor = small.row_factor[place + g + 8 * e];
          const float2 G = small.G[LOG_ROWS + row];
          const u64 seen = small.mask[row];
          auto decayed = [&](int column) {  // of the system
            const float2 other = small.G[column];
            return factor * small.key_scale[column] * __expf(fminf((G.x - other.x) + (G.y - other.y), 0.f));
          };
          if (LOG_BLOCKS && sees_log) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int column = 8 * half + 2 * t;
              const float sign = is_query ? 1.f : -1.f;
              u32 hi, lo;
              split2(sign * decayed(column) * log_gram[4 * half + 2 * e],
                     sign * decayed(column + 1) * log_gram[4 * half + 2 * e + 1], hi, lo);
              u8* to = memory + W_AT + half * W_PITCH + (place + g + 8 * e) * 16 + 4 * t;
              *(u32*)to = hi, *(u32*)(to + W_BYTES) = lo;
            }
          }
#pragma unroll
          for (int i = 0; i < ROWS / 8; i++) {
            if (8 * i > place % ROWS / BLOCK * BLOCK + BLOCK - 1) continue;  // blocks above the diagonal
            const int column = 8 * i + 2 * t, block = 8 * i / BLOCK;
            float w[2] = {0.f, 0.f};
            if (8 * i <= place % ROWS + 15) {
#pragma unroll
              for (int c = 0; c < 2; c++) {
                const bool sees = (seen >> (column + c) & 1) && (is_query || row != column + c);
                if (sees) w[c] = decayed(LOG_ROWS + column + c) * gram[4 * i + 2 * e + c];
              }
            }
            u32 hi, lo, least;
            if (is_query) {
              split2(w[0], w[1], hi, lo);
              u8* to = memory + c_at(block) + (i % (BLOCK / 8)) * c_pitch(block) + (row - block * BLOCK) * 16 + 4 * t;
              *(u32*)to = hi, *(u32*)(to + c_bytes(block)) = lo;
            } else if (row / BLOCK == block) {
              float* scratch = (float*)(memory + T_AT + block * T_PARTS * T_BYTES);
              *(float2*)(scratch + (row % BLOCK) * SCRATCH_PITCH + column % BLOCK) = make_float2(w[0], w[1]);
            } else {
              split3(-w[0], -w[1], hi, lo, least);
              u8* to = memory + L_AT + i * (BLOCK * 16) + (row % BLOCK) * 16 + 4 * t;
              *(u32*)to = hi, *(u32*)(to + L_BYTES) = lo;
              if (L_PARTS == 3) *(u32*)(to + 2 * L_BYTES) = least;
            }
          }
        }
      }
      __syncthreads();
      // ---- T of each block: a lane per column ----
      if (warp < BLOCKS) {
        const float* scratch = (const float*)(memory + T_AT + warp * T_PARTS * T_BYTES);
        const int column = lane % BLOCK;
        float T[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
          float sum = i == column ? 1.f : 0.f;
#pragma unroll
          for (int m = 0; m < i; m += 4) {
            const float4 l = *(const float4*)(scratch + i * SCRATCH_PITCH + m);
            sum = fmaf(-l.x, T[m], sum);
            if (m + 1 < i) sum = fmaf(-l.y, T[m + 1], sum);
            if (m + 2 < i) sum = fmaf(-l.z, T[m + 2], sum);
            if (m + 3 < i) sum = fmaf(-l.w, T[m + 3], sum);
          }
          T[i] = sum;
        }
        __syncwarp();  // every lane has read L
        u8* to = memory + T_AT + warp * T_PARTS * T_BYTES + column / 8 * T_PITCH + column % 8 * 2;
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
          u32 hi, mid, lo;
          split3(i == column ? 0.f : T[i], 0.f, hi, mid, lo);
          if (BLOCK == 32 || lane < BLOCK) {
            *(u16*)(to + i * 16) = (u16)hi;
            *(u16*)(to + T_BYTES + i * 16) = (u16)mid;
            *(u16*)(to + 2 * T_BYTES + i * 16) = (u16)lo;
          }
        }
      } else if (value_head % group == 0 && share == 0) {
        // Records of the keys; what they overwrite is no log row of this launch.
        for (int x = thread - 32 * BLOCKS; x < rows * CHUNKS; x += THREADS - 32 * BLOCKS) {
          const int row = x / CHUNKS, piece = x % CHUNKS;
          const u32 to = small.place[row] / record_bytes;
          *(uint4*)(k_records + ((i64)to * key_heads + key_head) * DIM + piece * 8) =
              *(const uint4*)(memory + piece * KEY_PITCH + row * 16);
        }
      }
      publish_to_products();
      __syncthreads();
    }

    // ---- right-hand sides and what S gives the outputs ----
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
      const float4 in = *(const float4*)&small.in[8 * i + 2 * t];
      const float2 out = *(const float2*)&small.out[8 * i + 2 * t];
      float* x = u[8 * i / BLOCK] + i % (BLOCK / 8) * 4;
      float* y = o[8 * i / BLOCK] + i % (BLOCK / 8) * 4;
      x[0] = fmaf(in.x, low_half(values[i][0]), -in.y * x[0]);
      x[1] = fmaf(in.z, low_half(values[i][1]), -in.w * x[1]);
      x[2] = fmaf(in.x, high_half(values[i][0]), -in.y * x[2]);
      x[3] = fmaf(in.z, high_half(values[i][1]), -in.w * x[3]);
      y[0] *= out.x, y[1] *= out.y, y[2] *= out.x, y[3] *= out.y;
    }
    // ---- the log's share of both ----
    if (LOG_BLOCKS && sees_log) {
      warpgroup_begin();
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        const int L = W_AT + block * BLOCK * 16, C = L + ROWS * 16;
        multiply(u[block], log_lo, operand(base, L, W_PITCH));
        multiply(u[block], log_mid, operand(base, L + W_BYTES, W_PITCH));
        multiply(u[block], log_mid, operand(base, L, W_PITCH));
        multiply(o[block], log_mid, operand(base, C, W_PITCH));
        multiply(u[block], log_hi, operand(base, L + W_BYTES, W_PITCH));
        multiply(o[block], log_hi, operand(base, C + W_BYTES, W_PITCH));
        multiply(u[block], log_hi, operand(base, L, W_PITCH));
        multiply(o[block], log_hi, operand(base, C, W_PITCH));
      }
      warpgroup_commit();
      wait();
    }
    // ---- solve block by block, outputs on the way ----
    const u32 u_offset = my_value * (u32)sizeof(log_t);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      u32 hi[STEPS][4], mid[STEPS][4], lo[STEPS][4];
#pragma unroll
      for (int s = 0; s < STEPS; s++) split_columns(u[block], 8 * s, hi[s], mid[s], lo[s]);
      warpgroup_begin();
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const int T = T_AT + block * T_PARTS * T_BYTES + 2 * s * T_PITCH;
        const u64 t_hi = operand(base, T, T_PITCH), t_mid = operand(base, T + T_BYTES, T_PITCH);
        multiply(u[block], lo[s], t_hi);
        multiply(u[block], hi[s], operand(base, T + 2 * T_BYTES, T_PITCH));
        multiply(u[block], mid[s], t_mid);
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
          multiply(later, lo[s], l_hi);
          if (L_PARTS == 3) multiply(later, hi[s], operand(base, L + 2 * L_BYTES, BLOCK * 16));
          multiply(later, mid[s], l_lo);
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
#pragma unroll
      for (int i = 0; i < BLOCK / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = block * BLOCK + 8 * i + 2 * t + e;
          if (row < rows)
            store_u((log_t*)((u8*)u_records + (small.place[row] + u_offset)), u[block][4 * i + e], u[block][4 * i + 2 + e]);
        }
      wait();
    }
    const u32 out_offset = (u32)first_token * out_pitch + 2 * my_value;
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * i + 2 * t + e;
        if (row < rows)
          *(u32*)((u8*)output + (out_offset + row * out_pitch)) =
              pack_bf16(o[8 * i / BLOCK][i % (BLOCK / 8) * 4 + e], o[8 * i / BLOCK][i % (BLOCK / 8) * 4 + 2 + e]);
      }
    value += 64;
  }
}
