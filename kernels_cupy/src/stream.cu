// Tree verification of at most 16 rows over a dense state and a log of at most 16 committed rows: warps that stream.
//
// Computes what verify.cu computes (the equations are there), for the trees that most requests have. The warps of a CTA
// prepare the small matrices of its value heads together, one task per head and kind; then each warp streams tiles of 16
// value rows x DIM keys of one head's S through two matrix products and waits for no other warp.
//
// Columns. Tree rows stand in groups of four; group i fills one column block of 8 of the tensor core's products: column
// 2 t is the key of row 4 i + t, column 2 t + 1 its query. So lane 4 g + t holds S k, S q, and later u and o, of row
// 4 i + t for two value rows (2 g and 2 g + 1 of the tile), and never exchanges anything with other lanes.
//
// Small matrices. With L, C as in verify.cu, T = (I + L)^-1 and R = beta v - beta e^G S k - L_log u_log:
//     [u; o] = [R; e^G S q + C_log u_log] + [T - I; C T] R
// T is exact to float (a lane per column substitutes), its entries are at most 1 in size since the delta rule contracts.
// The Gram matrix comes out of the tensor core in the place where the product with it wants its operand: entry [column
// g, row t] in lane 4 g + t. Hence [L_log; C_log] and [T - I; C T] are kept lane by lane, as bf16 hi and lo (and least)
// parts: in registers for up to 4 rows, in shared memory beyond.
// R of rows 8 p + t and 8 p + 4 + t is one 32-bit word of two bf16 in each of three parts: products of 8 k-slots need no
// register to move.
//
// Shared memory: keys and queries of the rows, keys of the log, `Cursor`, `Head` of each value head; then per warp STAGES
// tiles and two places for what a tile takes of v and of the log's u. Without helpers a CTA serves one request.
// Pipeline. Asynchronous copies bring a tile, its v and its u of the log, STAGES tiles ahead; what a tile needs comes the
// way the tile comes, since loads into registers are waited for at the end of the loop.
// Helpers (HELPERS > 0) prepare request after request into two buffers, which go back and forth by two mbarriers each.
// Occupancy: MIN_CTAS bounds the registers. 12 to 16 warps of a multiprocessor have 168 to 128 registers and 128 KiB of
// tiles in flight; every one is at another point of its life. 16 rows with an fp32 state fit three CTAs of four warps.
// Precision and traffic: as verify.cu. Nothing here needs an instruction newer than those of sm_80.
#include "common.cuh"

#ifndef GROUPS  // groups of four tree rows: 1, 2 or 4
#define GROUPS 1
#endif
#ifndef LOG_BLOCKS  // 0, or 1 for a log of up to 16 rows
#define LOG_BLOCKS 1
#endif
#ifndef WARPS  // warps that stream tiles
#define WARPS 4
#endif
#ifndef HELPERS  // warps that only prepare, for request after request; without any the others prepare, for one
#define HELPERS 0
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif
#ifndef STAGES
#define STAGES 1
#endif
constexpr int THREADS = 32 * (WARPS + HELPERS), PREPARERS = 32 * (HELPERS ? HELPERS : WARPS);
constexpr int ROWS = 4 * GROUPS, PAIRS = (GROUPS + 1) / 2, LOG_ROWS = 16;
constexpr int TILES_PER_HEAD = DIM / 16;
// A tile in shared memory. fp32: 16-byte pieces in the order of the lanes that copy and read them. bf16: rows padded by 16
// bytes, first the even ones, then the odd ones, as load_matrix4 wants them.
constexpr int ROW_BYTES = DIM * (int)sizeof(state_t) + (STATE_BF16 ? 16 : 0);
constexpr int STAGE_BYTES = 16 * ROW_BYTES;
// What a tile takes of v and of the log's u, 16 value rows wide, has two places of its own.
constexpr int U_PITCH = 16 * (int)sizeof(log_t);
constexpr int U_OFFSET = 32 * ROWS, SIDE_BYTES = U_OFFSET + (LOG_BLOCKS ? LOG_ROWS * U_PITCH : 0);
constexpr int WARP_BYTES = STAGES * STAGE_BYTES + 2 * SIDE_BYTES;
constexpr bool KEEP = GROUPS == 1;   // small matrices stay in registers
constexpr int BUFFERS = HELPERS ? 2 : 1;
constexpr bool CHAINS = GROUPS < 4;  // room for a second chain of products
constexpr int SHARERS = 32 / ROWS;                            // lanes that share a column of T
constexpr int SHARE = ROWS > SHARERS ? ROWS / SHARERS : 1;    // rows of C T that each of them makes
constexpr int BLOCKS_OF_TREE = GROUPS == 4 ? 6 : GROUPS;      // blocks of 4 columns x 8 rows on and below the diagonal
DEVICE constexpr int tree_block(int i, int p) { return i < 2 ? i : 2 * i - 2 + p; }

// What the warps of a CTA need to know of a request, beside keys and small matrices.
struct Cursor {
  float scale[2 * ROWS];   // 1 / |k| and DIM^-0.5 / |q| of each row, in the order of the columns
  float log_scale[LOG_ROWS];
  u32 log_place[LOG_ROWS], tree_place[ROWS];  // where u of a row starts, in bytes from the start of the records
  int length, flush, unused[2];
};
constexpr int KEY_BYTES = (2 * ROWS + (LOG_BLOCKS ? LOG_ROWS : 0)) * DIM * 2;

// What the tiles of one value head need. The B operands are stored lane by lane.
struct Head {
  float4 factor[ROWS];               // beta, -beta e^G / |k|, e^G DIM^-0.5 / |q|
  uint4 tree[BLOCKS_OF_TREE][32];    // [T - I; C T]: hi, lo, least
#if LOG_BLOCKS
  uint4 log[GROUPS][32];             // [L_log; C_log]: hi of log rows 2 t and 2 t + 1, hi of 2 t + 8 and 2 t + 9, lo of both
  float fold[LOG_ROWS + 4];          // e^{G_h - G_j} / |k_j|, then e^{G_h}
#endif
  float L[ROWS][ROWS], C[ROWS][ROWS];  // then T - I and C T
};

#ifdef EXPECTED_SMALL_BYTES
static_assert(BUFFERS * (KEY_BYTES + sizeof(Cursor) + sizeof(Head)) + (HELPERS ? 64 : 0) == EXPECTED_SMALL_BYTES,
              "StreamPlan.shared_bytes");
#endif

// Where this lane's first 16 bytes of a tile are, in elements of a head, and where they go. The others follow at fixed
// distances: pairs of rows of 64 bytes (fp32), or whole rows (bf16).
DEVICE int piece_in_head(int lane) {
#if STATE_BF16
  return lane * 8;
#else
  return (lane >> 2) * 2 * DIM + (lane & 3) * 4;
#endif
}
DEVICE int piece_in_stage(int lane) {
#if STATE_BF16
  const int chunk = lane % (DIM / 8), row = lane / (DIM / 8);
  return ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + chunk * 16;
#else
  return lane * 16;
#endif
}
constexpr int PIECES = DIM * (int)sizeof(state_t) / 32;  // of a lane
DEVICE constexpr int next_in_head(int i) { return STATE_BF16 ? 256 * i : (i >> 1) * 16 + (i & 1) * DIM; }
DEVICE constexpr int next_in_stage(int i) { return STATE_BF16 ? 128 / DIM * i * ROW_BYTES : 512 * i; }

// Where 16-byte piece p of row r of u is: pieces of an fp32 row change places against bank conflicts.
DEVICE int u_place(int r, int p) { return r * U_PITCH + ((LOG_BF16 ? p : p ^ (r >> 1 & 3)) << 4); }

DEVICE void copy_tile(u32 stage, const state_t* piece) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) copy_async16(stage + next_in_stage(i), piece + next_in_head(i));
}

// Eight columns of a key row, to shared memory and back: in their own order for a bf16 state.
DEVICE void place_row(u16* keys, int row, int column, uint4 words) {
#if STATE_BF16
  *(uint4*)(keys + row * DIM + (column ^ ((row & 7) << 3))) = words;
#else
  store_keys(keys, row, column, words);
#endif
}
DEVICE uint4 row_piece(const u16* keys, int row, int column) {
#if STATE_BF16
  return *(const uint4*)(keys + row * DIM + (column ^ ((row & 7) << 3)));
#else
  return load_keys(keys, row, column);
#endif
}

DEVICE double shuffle(double x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// What one row of the system needs as a column of the small matrices, in registers of the lanes that use it.
struct Column {
  float G, G_rest, scale;  // log decay from the base as a sum of two floats; 1 / |k|
};

DEVICE float decay_between(float G, float G_rest, const Column& column) {
  return __expf(fminf((G - column.G) + (G_rest - column.G_rest), 0.f));
}

// Inputs of one value head that belong to a lane's row; lanes 0-15 stand for the rows of the log, 16-31 for the tree's.
struct Gates {
  u32 a, b;  // as they are stored
  float A_log, dt_bias, log_decay;
};

// ---- barriers in shared memory (mbarrier) ----

DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 token;\nmbarrier.arrive.shared.b64 token, [%0];\n}" ::"r"(barrier) : "memory");
}
// Until the phase of this parity has ended; the phase before the first has parity 1.
DEVICE void barrier_wait(u32 barrier, int parity) {
#if __CUDA_ARCH__ >= 900
#define BARRIER_TEST "mbarrier.try_wait.parity.shared.b64"
#else
#define BARRIER_TEST "mbarrier.test_wait.parity.shared.b64"
#endif
  int done;
  do {
    asm volatile("{\n.reg .pred done;\n" BARRIER_TEST " done, [%1], %2;\nselp.b32 %0, 1, 0, done;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
template <int COUNT>
DEVICE void barrier_threads() { asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory"); }

// grid: (CTAs of a key head, key heads, requests at a time)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify_stream(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
              int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
              const float* __restrict__ A_log, const float* __restrict__ dt_bias, const u64* __restrict__ masks,
              int mask_pitch, state_t* state, const int* __restrict__ slots, log_t* u_records, u16* k_records,
              float* g_records, int record_rows, const int* __restrict__ log_length, const int* __restrict__ row_list,
              u16* __restrict__ output, int rows, int key_heads, int value_heads, int group, int tiles_per_warp, int requests,
              int capacity, int reserve, float norm_eps) {
  const int key_head = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, t = lane & 3;
  // Tiles of this CTA, counted from the first of its key head; the value heads they belong to.
  const int cta_tile = blockIdx.x * WARPS * tiles_per_warp;
  const int first_head = key_head * group + cta_tile / TILES_PER_HEAD;
  const int heads = max(WARPS * tiles_per_warp / TILES_PER_HEAD, 1);
  const u32 record_bytes = value_heads * DIM * (u32)sizeof(log_t);  // u of one row

  extern __shared__ __align__(128) u8 memory[];
  const int buffer_bytes = KEY_BYTES + (int)sizeof(Cursor) + heads * (int)sizeof(Head);
  auto buffer_of = [&](int turn) { return memory + (HELPERS ? 64 : 0) + turn * buffer_bytes; };
  u8* stages = buffer_of(BUFFERS) + warp * WARP_BYTES;
  // Barriers of the two buffers: `full` when all helpers have written one, `empty` when all others have done with it.
  const u32 full = shared_address(memory), empty = full + 16;
  if (HELPERS) {
    if (tid < 2) {
      barrier_init(full + 8 * tid, HELPERS);
      barrier_init(empty + 8 * tid, WARPS);
    }
    __syncthreads();
  }
  int request = blockIdx.z;

  // ---- preparing: keys and small matrices of one request into a buffer ----
  const int first_thread = HELPERS ? 32 * WARPS : 0, place = tid - first_thread;
  const int row = lane - 16;  // lanes 0-15 stand for the rows of the log, lanes 16-31 for those of the tree
  const bool is_tree = row >= 0 && row < rows;
  const int kinds = LOG_BLOCKS ? 2 : 1;  // of small matrices: of the tree, of the log
  const int first_task = place >> 5;
  const bool is_query = g & 1;
  auto head_of = [&](int task) { return LOG_BLOCKS ? task >> 1 : task; };
  constexpr int LANES = DIM / 8, ROWS_AT_ONCE = PREPARERS / LANES;
  constexpr int PASSES = (2 * ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  constexpr int LOG_PASSES = (LOG_ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const int piece = tid % LANES;
  // `meanwhile(length, log_record)` runs when all loads are on their way; the buffer is written after it only.
  auto prepare = [&](u8* buffer, auto meanwhile) {
    u16* keys = (u16*)buffer;
    u16* log_keys = keys + 2 * ROWS * DIM;
    Cursor& cursor = *(Cursor*)(buffer + KEY_BYTES);
    Head* table = (Head*)(&cursor + 1);
    const i64 record_base = (i64)request * record_rows;
    const int first_token = request * rows;
    int length = 0, log_record = 0, tree_record = row;
    if (LOG_BLOCKS) {
      length = min(log_length[request], LOG_ROWS);
      if (lane < min(record_rows, LOG_ROWS)) log_record = row_list[record_base + lane];
    }
    u32 mask = 0;
    if (is_tree) mask = (u32)masks[(i64)request * mask_pitch + row];
    uint4 words[PASSES], log_words[LOG_PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int column = place / LANES + i * ROWS_AT_ONCE, r = column >> 1;
      words[i] = make_uint4(0, 0, 0, 0);
      if (r < rows && column < 2 * ROWS)
        words[i] = *(const uint4*)((column & 1 ? q + (i64)(first_token + r) * q_pitch : k + (i64)(first_token + r) * k_pitch) +
                                   key_head * DIM + piece * 8);
    }
    auto load_gates = [&](int task) {
      Gates x{};
      const int value_head = first_head + head_of(task);
      if (is_tree) {
        const int index = (first_token + row) * value_heads + value_head;
        x.a = load_gate(a, index, gates_bf16), x.b = load_gate(b, index, gates_bf16);
        x.A_log = A_log[value_head], x.dt_bias = dt_bias[value_head];
      } else if (LOG_BLOCKS && lane < length) {
        x.log_decay = g_records[(record_base + log_record) * value_heads + value_head];
      }
      return x;
    };
    if (LOG_BLOCKS) {
#pragma unroll
      for (int i = 0; i < LOG_PASSES; i++) {
        const int r = place / LANES + i * ROWS_AT_ONCE;
        const int source = shuffle(log_record, r & 15);
        log_words[i] = make_uint4(0, 0, 0, 0);
        if (r < length)
          log_words[i] = *(const uint4*)(k_records + ((record_base + source) * key_heads + key_head) * DIM + piece * 8);
      }
      if (is_tree) tree_record = row_list[record_base + length + row];
    }
    const Gates gates = first_task < kinds * heads ? load_gates(first_task) : Gates{};
    const bool flush = LOG_BLOCKS && length > 0 && length + reserve > capacity;
    const bool sees_log = LOG_BLOCKS && length > 0 && !flush;
    meanwhile(length, log_record);

    // Log decays along the paths: every lane jumps to the ancestor of its ancestor.
    float beta, own_decay;
    double G;
    auto add_decays = [&](const Gates& x) {
      beta = is_tree ? sigmoid(gate_value(x.b, gates_bf16)) : 0.f;
      own_decay = is_tree ? log_decay(gate_value(x.a, gates_bf16), x.A_log, x.dt_bias) : x.log_decay;
      G = own_decay;
      const u32 above = is_tree ? mask & ~(1u << row) : 0;
      int up = is_tree ? (above ? 16 + 31 - __clz(above) : flush ? -1 : length - 1) : lane < length ? lane - 1 : -1;
      while (__any_sync(0xffffffffu, up >= 0)) {
        const int from = max(up, 0);
        const double more = shuffle(G, from);
        const int next = shuffle(up, from);
        if (up >= 0) G += more, up = next;
      }
    };
    add_decays(gates);

    // Keys and queries to shared memory, norms.
    auto place_keys = [&](u16* to, int r, uint4 w, float* scale, float factor) {
      float sum = sum_of_squares(w);
#pragma unroll
      for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      place_row(to, r, piece * 8, w);
      if (piece == 0) *scale = factor * rsqrtf(sum + norm_eps);
    };
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int column = place / LANES + i * ROWS_AT_ONCE;
      if (2 * ROWS % ROWS_AT_ONCE == 0 || column < 2 * ROWS)
        place_keys(keys, column, words[i], &cursor.scale[column],
                   column & 1 ? (DIM == 128 ? 0.08838834764831845f : 0.125f) : 1.f);
    }
    if (LOG_BLOCKS) {
#pragma unroll
      for (int i = 0; i < LOG_PASSES; i++) {
        const int r = place / LANES + i * ROWS_AT_ONCE;
        if (LOG_ROWS % ROWS_AT_ONCE == 0 || r < LOG_ROWS)
          place_keys(log_keys, r, log_words[i], &cursor.log_scale[r], 1.f);
      }
    }
    if (first_task == 0) {
      if (lane < LOG_ROWS) cursor.log_place[lane] = (u32)(record_base + log_record) * record_bytes;
      else if (row < ROWS) cursor.tree_place[row] = (u32)(record_base + tree_record) * record_bytes;
      if (lane == 0) cursor.length = length, cursor.flush = flush;
    }
    barrier_threads<PREPARERS>();

    // Small matrices, one task per value head and kind.
    const u32 key_address = shared_address(keys);
    const u32 a_offset = GROUPS == 1 ? (lane & 7) * 2 * DIM + (((lane >> 4) ^ (lane & 7)) << 4) : a_key_offset(lane);
#pragma unroll 1
    for (int task = first_task; task < kinds * heads; task += PREPARERS / 32) {
      if (task != first_task) add_decays(load_gates(task));
      Head& head = table[head_of(task)];
      const bool of_log = LOG_BLOCKS && ((task ^ (task >> 1)) & 1);

      const float own_scale = is_tree ? cursor.scale[2 * row] : lane < length ? cursor.log_scale[lane] : 0.f;
      const float query_scale = is_tree ? cursor.scale[2 * row + 1] : 0.f;
      const float G_first = (float)G, G_rest = (float)(G - G_first);
      auto column_of = [&](int source) {
        return Column{shuffle(G_first, source), shuffle(G_rest, source), shuffle(own_scale, source)};
      };
      float factor[GROUPS], row_G[GROUPS], row_rest[GROUPS];  // of the row of column g in group i
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        const int source = 16 + 4 * i + (g >> 1);
        const float for_key = shuffle(beta * own_scale, source), for_query = shuffle(query_scale, source);
        factor[i] = is_query ? for_query : for_key;
        row_G[i] = shuffle(G_first, source), row_rest[i] = shuffle(G_rest, source);
      }
#if LOG_BLOCKS
      if (of_log) {
        if (flush) {
          const double last = shuffle(G, length - 1);
          if (lane < LOG_ROWS) head.fold[lane] = lane < length ? __expf((float)(last - G)) * own_scale : 0.f;
          if (lane == 0) head.fold[LOG_ROWS] = exp_near_one((float)last);
        } else if (sees_log) {
          float gram[PAIRS][2][4] = {};
          const u32 log_address = shared_address(log_keys), b_offset = b_key_offset(lane);
#pragma unroll 4
          for (int j = 0; j < K_STEPS; j++) {
            u32 y[4];
            load_matrix4(y, log_address + (b_offset ^ (32 * j)));
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
              u32 x[4];
              load_matrix4(x, key_address + p * 32 * DIM + (a_offset ^ (32 * j)));
              mma(gram[p][0], x, y[0], y[1]);
              mma(gram[p][1], x, y[2], y[3]);
            }
          }
          const Column columns[4] = {column_of(2 * t), column_of(2 * t + 1), column_of(2 * t + 8), column_of(2 * t + 9)};
#pragma unroll
          for (int i = 0; i < GROUPS; i++) {
            const float sign = is_query ? factor[i] : -factor[i];
            float w[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
              w[c] = sign * columns[c].scale * decay_between(row_G[i], row_rest[i], columns[c]) *
                     gram[i / 2][c / 2][2 * (i & 1) + (c & 1)];
            u32 hi[2], lo[2];
            split2(w[0], w[1], hi[0], lo[0]);
            split2(w[2], w[3], hi[1], lo[1]);
            head.log[i][lane] = make_uint4(hi[0], hi[1], lo[0], lo[1]);
          }
        }
        continue;
      }
#endif
      const int value_head = first_head + head_of(task);
      const float from_base = exp_near_one(G_first);
      if (row >= 0 && row < ROWS)
        head.factor[row] = make_float4(beta, -beta * own_scale * from_base, query_scale * from_base, 0.f);
      if (is_tree && (heads > 1 || cta_tile % TILES_PER_HEAD == 0))  // the record of the gates; no row of the log is overwritten
        g_records[(record_base + tree_record) * value_heads + value_head] = own_decay;
      u32 row_mask[GROUPS];
#pragma unroll
      for (int i = 0; i < GROUPS; i++) row_mask[i] = shuffle((int)mask, 16 + 4 * i + (g >> 1));
      // Column n = 2 t of a product is row 8 p + t, column 2 t + 1 row 8 p + 4 + t.
      const int n = lane & 7, b_row = GROUPS == 1 ? n & 6 : 2 * ((n >> 1) + 4 * (n & 1));
      const u32 b_offset = b_row * 2 * DIM + (((lane >> 3) ^ (b_row & 7)) << 4);
#pragma unroll
      for (int other = 0; other < PAIRS; other++) {
        float gram[PAIRS][4] = {};
#pragma unroll 2
        for (int j = 0; j < K_STEPS; j += 2) {
          u32 y[4];
          load_matrix4(y, key_address + other * 32 * DIM + (b_offset ^ (32 * j)));
#pragma unroll
          for (int p = other; p < PAIRS; p++) {
            u32 x[4];
            load_matrix4(x, key_address + p * 32 * DIM + (a_offset ^ (32 * j)));
            mma(gram[p], x, y[0], y[1]);
            load_matrix4(x, key_address + p * 32 * DIM + (a_offset ^ (32 * j + 32)));
            mma(gram[p], x, y[2], y[3]);
          }
        }
#pragma unroll
        for (int e = 0; e < (GROUPS == 1 ? 1 : 2); e++) {
          const int c = 8 * other + 4 * e + t;
          const Column column = column_of(16 + c);
#pragma unroll
          for (int i = 0; i < GROUPS; i++) {
            const int r = 4 * i + (g >> 1);
            const bool sees = (row_mask[i] >> c & 1) && (is_query || r != c);
            const float x = factor[i] * column.scale * decay_between(row_G[i], row_rest[i], column) *
                            (i / 2 >= other ? gram[i / 2][2 * (i & 1) + e] : 0.f);
            (is_query ? head.C : head.L)[r][c] = sees ? x : 0.f;
          }
        }
      }
      __syncwarp();
      if (GROUPS == 1 && rows == 1) {  // nothing to solve: T = 1
        head.tree[0][lane] = make_uint4(0, 0, 0, 0);
        if (lane == 4) {  // the query's column, row 0
          uint4 w = make_uint4(0, 0, 0, 0);
          split3(head.C[0][0], 0.f, w.x, w.y, w.z);
          head.tree[0][4] = w;
        }
        continue;
      }
      // A lane per column of T; lanes with one column share the rows of C T.
      const int c = lane % ROWS, part = lane / ROWS;
      float T[ROWS], made[SHARE];
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        float sum = i == c ? 1.f : 0.f;
#pragma unroll
        for (int m = 0; m < i; m += 4) {
          const float4 l = *(const float4*)&head.L[i][m];
          sum = fmaf(-l.x, T[m], sum);
          if (m + 1 < i) sum = fmaf(-l.y, T[m + 1], sum);
          if (m + 2 < i) sum = fmaf(-l.z, T[m + 2], sum);
          if (m + 3 < i) sum = fmaf(-l.w, T[m + 3], sum);
        }
        T[i] = sum;
      }
      const bool makes = part * SHARE < ROWS;
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        float sum = 0.f;
        if (makes) {
#pragma unroll
          for (int m = 0; m < ROWS; m += 4) {
            const float4 w = *(const float4*)&head.C[part * SHARE + i][m];
            sum = fmaf(w.x, T[m], fmaf(w.y, T[m + 1], fmaf(w.z, T[m + 2], fmaf(w.w, T[m + 3], sum))));
          }
        }
        made[i] = sum;
      }
      __syncwarp();
      if (makes) {
#pragma unroll
        for (int i = 0; i < SHARE; i++) head.C[part * SHARE + i][c] = made[i];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
          if (i / SHARE == part) head.L[i][c] = i == c ? 0.f : T[i];
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        const float* line = (is_query ? head.C : head.L)[4 * i + (g >> 1)];
#pragma unroll
        for (int p = 0; p <= i / 2; p++) {
          uint4 w;
          split3(line[8 * p + t], GROUPS == 1 ? 0.f : line[8 * p + 4 + t], w.x, w.y, w.z);
          w.w = 0;
          head.tree[tree_block(i, p)][lane] = w;
        }
      }
    }
    // Records of the keys; what they overwrite is no log row of this launch.
    if (blockIdx.x == 0) {
      constexpr int OF_WARP = 32 / LANES;  // rows of a warp at a time: all of its lanes shuffle
      for (int r = place / LANES; r < (rows + OF_WARP - 1) / OF_WARP * OF_WARP; r += ROWS_AT_ONCE) {
        const int to = shuffle(tree_record, 16 + r);
        if (r < rows)
          *(uint4*)(k_records + ((record_base + to) * key_heads + key_head) * DIM + piece * 8) =
              row_piece(keys, 2 * r, piece * 8);
      }
    }
  };

  if (HELPERS && warp >= WARPS) {
    for (int turn = 0, parity = 1; request < requests; request += gridDim.z) {
      if (slots[request] < 0) continue;
      prepare(buffer_of(turn), [&](int, int) { barrier_wait(empty + 8 * turn, parity); });
      __syncwarp();
      if (lane == 0) barrier_arrive(full + 8 * turn);
      turn ^= 1;
      if (turn == 0) parity ^= 1;
    }
    return;
  }

  // ---- streaming ----
  u8* sides = stages + STAGES * STAGE_BYTES;
  const u32 stage_address = shared_address(stages) + piece_in_stage(lane);
  const u32 first_stage = shared_address(stages), first_side = shared_address(sides);
  const int my_tile = cta_tile + warp * tiles_per_warp;  // this warp's first, of its key head
  const int value_head = key_head * group + my_tile / TILES_PER_HEAD;
  const u32 first_value = value_head * DIM + my_tile % TILES_PER_HEAD * 16;
  auto tile_of = [&](int slot) {  // this lane's piece of the first tile
    return state + (((i64)slot * value_heads + key_head * group) * TILES_PER_HEAD + my_tile) * 16 * DIM + piece_in_head(lane);
  };
  // Where the next copy of v and u comes from: bytes from the start of an array; the host checks that 32 bits hold them.
  // Rows that are not there stand for the last (the first of the log): their factors are zero.
  constexpr int U_PIECES = (int)sizeof(log_t), U_COPIES = U_PIECES / 2;  // 16-byte pieces of a row; copies of a lane
  u32 v_from = 0, u_from[U_COPIES] = {};
  bool copies_log = false;
  auto aim_v = [&](int request) {
    v_from = ((u32)(request * rows + min(lane >> 1, rows - 1)) * v_pitch + first_value) * 2 + (lane & 1) * 16;
  };
  auto aim = [&](int request, const Cursor& cursor) {
    aim_v(request);
    copies_log = LOG_BLOCKS && cursor.length > 0;
#pragma unroll
    for (int i = 0; i < U_COPIES; i++) {
      const int r = (lane + 32 * i) / U_PIECES;
      u_from[i] = first_value * (u32)sizeof(log_t) + cursor.log_place[r < cursor.length ? r : 0] + lane % U_PIECES * 16;
    }
  };
  auto copy_rows = [&](u32 side) {  // and go to the next tile
    if (lane < 2 * ROWS) copy_async16(side + lane * 16, (const u8*)v + v_from);
    v_from += 32;
    if (copies_log) {
#pragma unroll
      for (int i = 0; i < U_COPIES; i++) {
        const int r = (lane + 32 * i) / U_PIECES;
        copy_async16(side + U_OFFSET + u_place(r, lane % U_PIECES), (const u8*)u_records + u_from[i]);
        u_from[i] += 16 * (u32)sizeof(log_t);
      }
    }
  };
  int slot = slots[request];
  if (HELPERS)
    while (slot < 0 && (request += gridDim.z) < requests) slot = slots[request];
  if (slot < 0) return;
  state_t* tile = tile_of(slot);
  auto copy_tiles = [&] {
#pragma unroll
    for (int i = 0; i < STAGES; i++)
      if (i < tiles_per_warp) copy_tile(stage_address + i * STAGE_BYTES, tile + i * 16 * DIM);
  };
  auto copy_all_rows = [&] {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      if (i < tiles_per_warp) copy_rows(first_side + i * SIDE_BYTES);
      copy_commit();
    }
  };
  if (HELPERS) {
    copy_tiles();
    barrier_wait(full, 0);
    aim(request, *(const Cursor*)(buffer_of(0) + KEY_BYTES));
    copy_all_rows();
  } else {
    prepare(buffer_of(0), [&](int length, int log_record) {
      copy_tiles();
      aim_v(request);
      copies_log = LOG_BLOCKS && length > 0;
#pragma unroll
      for (int i = 0; i < U_COPIES; i++) {
        const int r = (lane + 32 * i) / U_PIECES;
        u_from[i] = first_value * (u32)sizeof(log_t) + lane % U_PIECES * 16 +
                    (u32)(request * record_rows + shuffle(log_record, r < length ? r : 0)) * record_bytes;
      }
      copy_all_rows();
    });
    __syncthreads();
  }

  const u32 b_offset = GROUPS == 1 ? (lane & 7) * 2 * DIM + (((lane >> 3) ^ (lane & 7)) << 4) : b_key_offset(lane);
  u32 count = 0;  // tiles done
  for (int turn = 0, parity = 0;;) {
    const u8* buffer = buffer_of(turn);
    const Cursor& cursor = *(const Cursor*)(buffer + KEY_BYTES);
    const Head& head = ((const Head*)(&cursor + 1))[value_head - first_head];
    const u32 key_address = shared_address(buffer);
    const bool flush = LOG_BLOCKS && cursor.flush, sees_log = LOG_BLOCKS && cursor.length > 0 && !flush;
    int next = HELPERS ? request + (int)gridDim.z : requests, next_slot = HELPERS && next < requests ? slots[next] : 0;
    u32 u_offset = (first_value + 2 * g) * (u32)sizeof(log_t);
    u32 out_offset = ((u32)(request * rows + t) * value_heads * DIM + first_value + 2 * g) * 2;
    uint4 log_kept[KEEP && LOG_BLOCKS ? GROUPS : 1], tree_kept[KEEP ? BLOCKS_OF_TREE : 1];
    float4 factor_kept[KEEP ? GROUPS : 1];
    if (KEEP) {
#if LOG_BLOCKS
      log_kept[0] = head.log[0][lane];
#endif
      factor_kept[0] = head.factor[t];
      tree_kept[0] = head.tree[0][lane];
    }
#pragma unroll 1
    for (int n = 0; n < tiles_per_warp; n++, count++, tile += 16 * DIM) {
      float product[GROUPS][4] = {}, rest[CHAINS ? GROUPS : 1][4] = {};  // S k and S q, raw; two chains if there is room
      u32 pair_keys[4];
      auto multiply = [&](const u32(&hi)[4], const u32(&lo)[4], int j, int odd) {  // odd = j % 2
        if (GROUPS == 1) {
          if (!odd) load_matrix4(pair_keys, key_address + (b_offset ^ (32 * j)));
          mma(STATE_BF16 && odd ? rest[0] : product[0], hi, pair_keys[2 * odd], pair_keys[2 * odd + 1]);
          if (!STATE_BF16) mma(rest[0], lo, pair_keys[2 * odd], pair_keys[2 * odd + 1]);
          return;
        }
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
          u32 x[4];
          load_matrix4(x, key_address + p * 32 * DIM + (b_offset ^ (32 * j)));
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int i = 2 * p + half;
            mma(CHAINS && STATE_BF16 && odd ? rest[CHAINS ? i : 0] : product[i], hi, x[2 * half], x[2 * half + 1]);
            if (!STATE_BF16) mma(CHAINS ? rest[CHAINS ? i : 0] : product[i], lo, x[2 * half], x[2 * half + 1]);
          }
        }
      };
        const int stage = STAGES > 1 ? count % STAGES * STAGE_BYTES : 0;
      copy_wait<STAGES - 1>();
      __syncwarp();  // what other lanes copied is there too
#if STATE_BF16
      const u32 matrix = first_stage + stage + ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (lane >> 4) * 16;
#else
      const uint4* pieces = (const uint4*)(stages + stage) + lane;
#endif
      const u8* side = sides + (count & 1) * SIDE_BYTES;
      auto logged = [&](int i) {  // u of log row 2 t, 2 t + 1, 2 t + 8 or 2 t + 9
        const int r = 2 * t + (i & 1) + 8 * (i >> 1), byte = 2 * g * (int)sizeof(log_t);
        return load_u((const log_t*)(side + U_OFFSET + u_place(r, byte >> 4) + (byte & 15)));
      };
      if (!flush) {
#pragma unroll
        for (int j = 0; j < K_STEPS; j++) {
          u32 hi[4], lo[4];
#if STATE_BF16
          load_matrix4(hi, matrix + 32 * j);
          multiply(hi, hi, j, j % 2);
#else
          const uint4 x = pieces[64 * j], y = pieces[64 * j + 32];
          split2(__uint_as_float(x.x), __uint_as_float(x.y), hi[0], lo[0]);
          split2(__uint_as_float(y.x), __uint_as_float(y.y), hi[1], lo[1]);
          split2(__uint_as_float(x.z), __uint_as_float(x.w), hi[2], lo[2]);
          split2(__uint_as_float(y.z), __uint_as_float(y.w), hi[3], lo[3]);
          multiply(hi, lo, j, j % 2);
#endif
        }
      } else {
#if LOG_BLOCKS
        // Fold the log: S <- e^{G_h} S + sum_j fold_j u_j k_j^T, write it, go on with it.
        u32 part[3][4];
        const float all = head.fold[LOG_ROWS];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 w = *(const float2*)&head.fold[2 * t + 8 * i];
          const float2 x = logged(2 * i), y = logged(2 * i + 1);
          split3(w.x * x.x, w.y * y.x, part[0][2 * i], part[1][2 * i], part[2][2 * i]);
          split3(w.x * x.y, w.y * y.y, part[0][2 * i + 1], part[1][2 * i + 1], part[2][2 * i + 1]);
        }
        const u32 fold_address = key_address + 4 * ROWS * DIM, fold_offset = a_key_offset(lane);
#pragma unroll 1
        for (int pair = 0; pair < K_STEPS; pair += 2)
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            const int j = pair + odd;
            u32 hi[4], lo[4], x[4];
            float s[8], left[4] = {}, right[4] = {};  // s: two keys of either value row, then two more of either
            load_matrix4_transposed(x, fold_address + (fold_offset ^ (32 * j)));
#if STATE_BF16
            load_matrix4(hi, matrix + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) s[2 * i] = low_half(hi[i]), s[2 * i + 1] = high_half(hi[i]);
#else
            const float4 y = *(const float4*)(pieces + 64 * j), z = *(const float4*)(pieces + 64 * j + 32);
            s[0] = y.x, s[1] = y.y, s[2] = z.x, s[3] = z.y, s[4] = y.z, s[5] = y.w, s[6] = z.z, s[7] = z.w;
#endif
#pragma unroll
            for (int p = 2; p >= 0; p--) {
              mma(left, part[p], x[0], x[1]);
              mma(right, part[p], x[2], x[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
              s[i] = fmaf(all, s[i], left[i]);
              s[4 + i] = fmaf(all, s[4 + i], right[i]);
            }
#if STATE_BF16
#pragma unroll
            for (int i = 0; i < 4; i++) {
              hi[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
              *(u32*)(stages + stage + ((i & 1) * 8 + g) * ROW_BYTES + 32 * j + 16 * (i >> 1) + 4 * t) = hi[i];
            }
            multiply(hi, hi, j, odd);
#else
            *(float4*)(tile + 16 * j) = make_float4(s[0], s[1], s[4], s[5]);
            *(float4*)(tile + DIM + 16 * j) = make_float4(s[2], s[3], s[6], s[7]);
#pragma unroll
            for (int i = 0; i < 4; i++) split2(s[2 * i], s[2 * i + 1], hi[i], lo[i]);
            multiply(hi, lo, j, odd);
#endif
          }
#if STATE_BF16
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PIECES; i++)
          *(uint4*)(tile + next_in_head(i)) = *(const uint4*)(stages + stage + piece_in_stage(lane) + next_in_stage(i));
#endif
#endif
      }
      __syncwarp();  // every lane has read the stage
      const int ahead = n + STAGES;
      if (HELPERS && ahead == tiles_per_warp)
        while (next < requests && next_slot < 0) {  // a request without a state
          next += gridDim.z;
          if (next < requests) next_slot = slots[next];
        }
      if (ahead < tiles_per_warp) copy_tile(stage_address + stage, tile + STAGES * 16 * DIM);
      else if (HELPERS && next < requests)
        copy_tile(stage_address + stage, tile_of(next_slot) + (ahead - tiles_per_warp) * 16 * DIM);

      // ---- right-hand sides and what S gives the outputs; then the log's share of both ----
      float x[GROUPS][4];
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        const u32 pair = *(const u32*)(side + (4 * i + t) * 32 + 4 * g);  // v of row 4 i + t
        const float4 factor = KEEP ? factor_kept[KEEP ? i : 0] : head.factor[4 * i + t];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float from_key = product[i][2 * e] + (CHAINS ? rest[CHAINS ? i : 0][2 * e] : 0.f);
          const float from_query = product[i][2 * e + 1] + (CHAINS ? rest[CHAINS ? i : 0][2 * e + 1] : 0.f);
          x[i][2 * e] = fmaf(factor.x, e ? high_half(pair) : low_half(pair), factor.y * from_key);
          x[i][2 * e + 1] = factor.z * from_query;
        }
      }
#if LOG_BLOCKS
      u32 hi[4], mid[4], lo[4];
      if (sees_log) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 first = logged(2 * i), second = logged(2 * i + 1);
          split3(first.x, second.x, hi[2 * i], mid[2 * i], lo[2 * i]);
          split3(first.y, second.y, hi[2 * i + 1], mid[2 * i + 1], lo[2 * i + 1]);
        }
      }
#endif
      __syncwarp();  // every lane has read v and u
      if (ahead < tiles_per_warp || next < requests) {
        if (ahead == tiles_per_warp) {  // the first tile of the next request
          barrier_wait(full + 8 * (turn ^ 1), parity ^ turn);
          aim(next, *(const Cursor*)(buffer_of(turn ^ 1) + KEY_BYTES));
        }
        copy_rows(first_side + (count + STAGES & 1) * SIDE_BYTES);
      }
      copy_commit();
#if LOG_BLOCKS
      if (sees_log) {
        float small[GROUPS][4] = {};  // a second chain where there are few
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const uint4 w = KEEP ? log_kept[KEEP ? i : 0] : head.log[i][lane];
          float(&second)[4] = CHAINS ? small[i] : x[i];
          mma(second, lo, w.x, w.y);
          mma(second, mid, w.z, w.w);
          mma(x[i], hi, w.z, w.w);
          mma(second, mid, w.x, w.y);
          mma(x[i], hi, w.x, w.y);
          if (CHAINS) {
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][e] += small[i][e];
          }
        }
      }
#endif

      // ---- u = R + (T - I) R, o += C T R ----
      u32 parts[PAIRS][3][2];  // hi, mid, lo of the value rows 2 g and 2 g + 1
#pragma unroll
      for (int p = 0; p < PAIRS; p++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          split3(x[2 * p][2 * e], 2 * p + 1 < GROUPS ? x[2 * p + 1 < GROUPS ? 2 * p + 1 : 0][2 * e] : 0.f, parts[p][0][e],
                 parts[p][1][e], parts[p][2][e]);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        float small[4] = {};
        float(&second)[4] = CHAINS ? small : x[i];
#pragma unroll
        for (int p = 0; p <= i / 2; p++) {
          const uint4 w = KEEP ? tree_kept[KEEP ? i : 0] : head.tree[tree_block(i, p)][lane];
          mma8(second, parts[p][2], w.x);
          mma8(second, parts[p][0], w.z);
          mma8(second, parts[p][1], w.y);
          mma8(x[i], parts[p][0], w.y);
          mma8(second, parts[p][1], w.x);
          mma8(x[i], parts[p][0], w.x);
        }
        if (CHAINS) {
#pragma unroll
          for (int e = 0; e < 4; e++) x[i][e] += small[e];
        }
        const u32 to = u_offset + cursor.tree_place[4 * i + t];
        if (4 * i + t < rows) {
          store_u((log_t*)((u8*)u_records + to), x[i][0], x[i][2]);
          *(u32*)((u8*)output + (out_offset + 8 * i * value_heads * DIM)) = pack_bf16(x[i][1], x[i][3]);
        }
      }
      u_offset += 16 * (u32)sizeof(log_t);
      out_offset += 32;
    }
    if (!HELPERS) return;
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * turn);
    if (next >= requests) return;
    request = next;
    tile = tile_of(next_slot);
    turn ^= 1;
    if (turn == 0) parity ^= 1;
  }
}
