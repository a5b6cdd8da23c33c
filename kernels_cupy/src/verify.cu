// Tree verification in closed form (tree-WY) over a dense state and a log of committed rows, with an optional flush.
//
// Computes, for every row t of a draft tree and every value head,
//     u_t = beta_t (v_t - e^{G_t} S k_t - sum_{j in log} dec[t,j] (k_j.k_t) u_j - sum_{i above t} dec[t,i] (k_i.k_t) u_i)
//     o_t = e^{G_t} S q_t + sum over log and path of dec (k.q_t) u
// from one read of the state S, and writes outputs o (bf16) and records (u, raw k, g) of all rows. A request whose log
// is too full for another path (log_length + reserve > capacity) first folds the log into S on chip, writes S, and
// verifies from it with an empty log. Which policy this is depends on capacity and reserve alone:
//     bole      no log (LOG_BLOCKS = 0); a batched launch commits later      treewy    reserve = capacity: flush always
//     treelog   a log of at least one path, reserve = longest path           deltalog  the same with one row
//     replayssm the same on chains, u stored as bf16 (LOG_BF16)
//
// Thread mapping. One CTA of 4, 8 or 16 warps per request, key head (or some of its value heads) and share of the value
// rows. The warps build the small matrices of the CTA's value heads together: Grams K K^T, Q K^T on tensor cores, decays,
// and the inverses of the 16 x 16 diagonal blocks of M = I + L in fp32. Then each warp streams tiles of 16 value rows x
// DIM keys of S alone, without barriers: a tile is an A operand of S K^T and S Q^T, its results are again A operands of
// the solve and of the outputs ("dv-major": rows are value rows, columns are tree rows).
// Lane 4 g + t holds value rows 2 g and 2 g + 1 of a tile (rows g and g + 8 of the MMA), so that v, u and o move as pairs.
// Keys are permuted inside groups of 16 (see key_position): a lane's state loads are 16 bytes.
//
// Shared memory: one state tile per warp, private to its lanes (an asynchronous copy of the next tile runs while this
// one is solved); raw keys and queries; L, C and T - I as bf16 hi and lo.
// Precision: q, k exact in bf16; S and the small matrices as hi + lo (17 bits; L on long paths with a third part); u in three
// parts (24 bits) where it acts on later rows and in the update of a flush, whose sum is in fp32 outside the tensor core.
// Sums of log decays in double, kept as two floats.
// Traffic per request and value head: 4 DIM^2 bytes of S (2 for bf16; twice that when flushing), per row 2 DIM (v) + 2
// DIM (o) + 4 DIM (u) + q, k and a key record shared by the value heads of a key head, per log row 4 DIM (u) + key.
#include "common.cuh"

#ifndef TILES  // tiles of 8 tree rows: rows <= 8 TILES
#define TILES 2
#endif
#ifndef LOG_BLOCKS  // log rows <= 16 LOG_BLOCKS
#define LOG_BLOCKS 1
#endif
#ifndef L_PARTS  // bf16 parts of L: 2, or 3 where paths are long
#define L_PARTS 2
#endif
#ifndef WARPS  // 4, 8 or 16
#define WARPS 4
#endif
#ifndef MIN_CTAS  // CTAs that fit a multiprocessor's shared memory; bounds the registers
#define MIN_CTAS (TILES <= 2 ? 3 : 2)
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCKS = (TILES + 1) / 2;                  // blocks of 16 tree rows
constexpr int ROWS = 16 * BLOCKS, LOG_ROWS = 16 * LOG_BLOCKS, COLUMNS = LOG_ROWS + ROWS;
// Unrolling more would spill registers here.
[[maybe_unused]] constexpr int K_UNROLL = TILES == 4 && LOG_BLOCKS == 0 ? 4 : K_STEPS;
constexpr int KEY_ROWS = TILES == 1 ? 8 : ROWS;           // tree rows kept as keys and queries
constexpr int STAGE_BYTES = 16 * DIM * (int)sizeof(state_t);
// The weights L and C are lower triangular: a block row of 16 tree rows ends with its diagonal block.
DEVICE constexpr int weight_pitch(int block) { return LOG_ROWS + 16 * (block + 1) + 8; }  // conflict-free for ldmatrix
DEVICE constexpr int weight_start(int block) { return 16 * block * (LOG_ROWS + 24) + 128 * block * (block - 1); }
constexpr int WEIGHT_ELEMENTS = weight_start(BLOCKS);    // of one of L hi, L lo, C hi, C lo, L least
constexpr int WEIGHT_PARTS = L_PARTS + 2;
constexpr int ONE_LOG = LOG_BLOCKS > 0 ? LOG_BLOCKS : 1; // arrays need a length

// What one value head needs beside the weights. Its size is repeated in BlockPlan.shared_bytes.
struct Head {
  double G[COLUMNS];        // log decay from the base, log rows first; then as a sum of two floats
  u8 up[COLUMNS];           // the row that a partial sum of G still lacks, NONE if complete
  float2 in[ROWS];          // beta, beta e^G / |k|
  float out[ROWS];          // e^G DIM^-0.5 / |q|
  float g[COLUMNS];
  float beta[ROWS];
  float fold[LOG_ROWS + 4]; // weights of a flush, e^{G_h - G_j} / |k_j|; then e^{G_h}
};

constexpr int NONE = 255;

struct Common {
  u64 mask[ROWS];
  float key_scale[COLUMNS];  // 1 / |k|, log rows first
  float query_scale[ROWS];   // DIM^-0.5 / |q|
  int row[COLUMNS];          // record row of each log row and tree row
  u32 place[COLUMNS];        // and where its u starts, in bytes
};

#ifdef EXPECTED_SMALL_BYTES
static_assert(sizeof(Head) + sizeof(Common) + 2 * WEIGHT_PARTS * WEIGHT_ELEMENTS == EXPECTED_SMALL_BYTES, "VerifyPlan.shared_bytes");
#endif

// A block of 16 value rows x 16 rows of the system as an A operand: hi + mid + lo, 24 bits.
struct Parts {
  u32 hi[4], mid[4], lo[4];
};

DEVICE void split_block(const float (&x)[2][4], Parts& parts) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    split3(x[i / 2][2 * (i & 1)], x[i / 2][2 * (i & 1) + 1], parts.hi[i], parts.mid[i], parts.lo[i]);
}

// A diagonal block of L is fp32 until it is inverted, in the place of the hi (columns 0-7) and lo (columns 8-15) parts of
// its inverse. `block` is the place of the hi part.
DEVICE float* diagonal_row(u16* block, int row, int pitch, int half) {
  return (float*)(block + half * WEIGHT_ELEMENTS + row * pitch);
}

// c[h] += a . block^T; the block's hi part at `hi`, its lo part WEIGHT_ELEMENTS later. What a row adds to the rows after it
// is EXACT in a, and on long paths in the block too: with repeated keys these errors would all add up along one key.
// Outputs do without.
template <int HALVES, bool EXACT>
DEVICE void accumulate(float (&c)[2][4], const Parts& a, u32 hi) {
  u32 b_hi[4], b_lo[4];
  load_matrix4(b_hi, hi);
  load_matrix4(b_lo, hi + 2 * WEIGHT_ELEMENTS);
  u32 b_least[4];
  if (EXACT && L_PARTS == 3) load_matrix4(b_least, hi + 8 * WEIGHT_ELEMENTS);
  float small[HALVES][4] = {};  // a second chain of dependent products
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    mma(c[half], a.hi, b_hi[2 * half], b_hi[2 * half + 1]);
    mma(small[half], a.mid, b_hi[2 * half], b_hi[2 * half + 1]);
    if (EXACT) mma(small[half], a.mid, b_lo[2 * half], b_lo[2 * half + 1]);
    mma(c[half], a.hi, b_lo[2 * half], b_lo[2 * half + 1]);
    if (EXACT) mma(small[half], a.lo, b_hi[2 * half], b_hi[2 * half + 1]);
    if (EXACT && L_PARTS == 3) mma(small[half], a.hi, b_least[2 * half], b_least[2 * half + 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) c[half][i] += small[half][i];
  }
}

DEVICE void copy_tile(u32 stage, const state_t* tile, int lane) {
  const int g = lane >> 2, t = lane & 3;
  constexpr int PIECES = DIM * (int)sizeof(state_t) / 64;  // 16-byte pieces per lane and row
#pragma unroll
  for (int j = 0; j < PIECES; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      copy_async16(stage + ((2 * j + e) * 32 + lane) * 16,
                   (const u8*)(tile + (2 * g + e) * DIM) + 64 * j + 16 * t);
  copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
       int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
       const float* __restrict__ A_log, const float* __restrict__ dt_bias, const u64* __restrict__ masks,
       int mask_pitch, state_t* state, const int* __restrict__ slots, log_t* u_records, u16* k_records,
       float* g_records, int record_rows, const int* __restrict__ log_length, const int* __restrict__ row_list,
       u16* __restrict__ output, int rows, int key_heads, int value_heads, int heads_per_cta, int value_shares,
       int capacity, int reserve, float norm_eps) {
  const int request = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, t = lane & 3;
  const int groups = value_heads / key_heads / heads_per_cta;
  const int share = blockIdx.x % value_shares;
  const int group = blockIdx.x / value_shares % groups;
  const int key_head = blockIdx.x / value_shares / groups;
  const int first_head = (key_head * groups + group) * heads_per_cta;

  wait_for_launch_before();
  written_before(q), written_before(k), written_before(v), written_before(a), written_before(b);
  const int slot = slots[request];
  if (slot < 0) return;

  extern __shared__ __align__(128) u8 memory[];
  const u32 stage = shared_address(memory) + warp * STAGE_BYTES;
  u16* tree_keys = (u16*)(memory + WARPS * STAGE_BYTES);
  u16* queries = tree_keys + KEY_ROWS * DIM;
  u16* log_keys = queries + KEY_ROWS * DIM;
  u16* weights = log_keys + (LOG_BLOCKS > 0 ? LOG_ROWS : KEY_ROWS == 8 ? 8 : 0) * DIM;  // per head: L hi, L lo, C hi, C lo
  Common& common = *(Common*)(weights + heads_per_cta * WEIGHT_PARTS * WEIGHT_ELEMENTS);
  Head* heads = (Head*)(&common + 1);

  const int share_rows = DIM / value_shares;
  const int tiles_per_head = share_rows / 16, num_tiles = heads_per_cta * tiles_per_head / WARPS;  // of the CTA; of a warp
  const i64 state_base = ((i64)slot * value_heads + first_head) * DIM * DIM;
  // This warp's tile n: its value head, counted from the CTA's first, its value rows, and the tile itself.
  auto head_of = [&](int n) { return (n * WARPS + warp) / tiles_per_head; };
  auto value_row = [&](int n) { return share * share_rows + (n * WARPS + warp) % tiles_per_head * 16; };
  auto tile_of = [&](int n) { return state + state_base + (i64)head_of(n) * DIM * DIM + (i64)value_row(n) * DIM; };
  // ---- first wave of loads: nothing here depends on another load but the slot's tile ----
  constexpr int LANES = DIM / 8, ROWS_AT_ONCE = THREADS / LANES;
  constexpr int LOG_PASSES = LOG_BLOCKS > 0 ? (LOG_ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE : 1;
  const int piece = tid % LANES;
  const i64 record_base = (i64)request * record_rows, first_token = (i64)request * rows;
  auto record_row = [&](int entry) { return row_list ? row_list[record_base + entry] : entry; };
  int length = 0;
  if (LOG_BLOCKS > 0) length = min(log_length[request], LOG_ROWS);
  int log_row[LOG_PASSES];  // record rows of the log keys that this thread loads
  if (LOG_BLOCKS > 0) {
#pragma unroll
    for (int i = 0; i < LOG_PASSES; i++) {
      const int r = tid / LANES + i * ROWS_AT_ONCE;
      log_row[i] = r < record_rows && r < LOG_ROWS ? record_row(r) : 0;
    }
  }
  u64 my_mask = 0;
  if (tid >= LOG_ROWS && tid - LOG_ROWS < rows) my_mask = masks[(i64)request * mask_pitch + tid - LOG_ROWS];
  u32 my_a = 0, my_b = 0;
  float my_A = 0.f, my_bias = 0.f;  // gates of the first head and row of this thread
  if (tid < heads_per_cta * ROWS && tid % ROWS < rows) {
    const int value_head = first_head + tid / ROWS;
    const i64 index = (first_token + tid % ROWS) * value_heads + value_head;
    my_a = load_gate(a, index, gates_bf16), my_b = load_gate(b, index, gates_bf16);
    my_A = A_log[value_head], my_bias = dt_bias[value_head];
  }
  copy_tile(stage, tile_of(0), lane);
  {
    constexpr int LINES = DIM / 64;  // 128-byte lines of one value row of v
    for (int x = tid; x < rows * heads_per_cta * LINES; x += THREADS)
      prefetch(v + (first_token + x / (heads_per_cta * LINES)) * v_pitch + first_head * DIM +
               x % (heads_per_cta * LINES) * 64);
  }
  const bool flush = LOG_BLOCKS > 0 && length > 0 && length + reserve > capacity;

  // ---- second wave: rows of the log ----
  uint4 log_words[LOG_PASSES];
  int my_row = 0;  // record row of column tid
  if (LOG_BLOCKS > 0) {
#pragma unroll
    for (int i = 0; i < LOG_PASSES; i++) {
      log_words[i] = make_uint4(0, 0, 0, 0);
      if (tid / LANES + i * ROWS_AT_ONCE < length)
        log_words[i] =
            *(const uint4*)(k_records + ((record_base + log_row[i]) * key_heads + key_head) * DIM + piece * 8);
    }
  }
  if (tid < COLUMNS) {
    const int row = tid - LOG_ROWS;
    if (row < 0 ? tid < length : row < rows) my_row = record_row(row < 0 ? tid : length + row);
  }

  // ---- keys and queries to shared memory, norms, gates ----
  auto place_keys = [&](u16* keys, int row, uint4 words, float* scale, float factor) {
    const float sum = sum_over<LANES>(sum_of_squares(words));
    store_keys(keys, row, piece * 8, words);
    if (piece == 0) *scale = factor * rsqrtf(sum + norm_eps);
  };
  constexpr int PASSES = 2 * KEY_ROWS / ROWS_AT_ONCE, BATCH = PASSES % 8 == 0 ? 8 : PASSES % 6 == 0 ? 6 : PASSES;
#pragma unroll 1
  for (int first = 0; first < PASSES; first += BATCH) {
    uint4 words[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int r = tid / LANES + (first + i) * ROWS_AT_ONCE, row = r % KEY_ROWS;
      words[i] = make_uint4(0, 0, 0, 0);
      if (row < rows)
        words[i] = *(const uint4*)((r < KEY_ROWS ? k + (first_token + row) * k_pitch : q + (first_token + row) * q_pitch) +
                                   key_head * DIM + piece * 8);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int r = tid / LANES + (first + i) * ROWS_AT_ONCE, row = r % KEY_ROWS;
      place_keys(r < KEY_ROWS ? tree_keys : queries, row, words[i],
                 r < KEY_ROWS ? common.key_scale + LOG_ROWS + row : common.query_scale + row,
                 r < KEY_ROWS ? 1.f : DIM == 128 ? 0.08838834764831845f : 0.125f);
    }
  }
  for (int x = tid; x < heads_per_cta * ROWS; x += THREADS) {
    const int h = x / ROWS, row = x % ROWS, value_head = first_head + h;
    float decay = 0.f, beta = 0.f;
    if (row < rows) {
      if (x >= THREADS) {
        const i64 index = (first_token + row) * value_heads + value_head;
        my_a = load_gate(a, index, gates_bf16), my_b = load_gate(b, index, gates_bf16);
        my_A = A_log[value_head], my_bias = dt_bias[value_head];
      }
      decay = log_decay(gate_value(my_a, gates_bf16), my_A, my_bias);
      beta = sigmoid(gate_value(my_b, gates_bf16));
    }
    heads[h].beta[row] = beta;
    heads[h].g[LOG_ROWS + row] = decay;
    if (row >= KEY_ROWS) common.key_scale[LOG_ROWS + row] = common.query_scale[row] = 0.f;
  }
  if (LOG_BLOCKS > 0) {
#pragma unroll
    for (int i = 0; i < LOG_PASSES; i++) {
      const int r = tid / LANES + i * ROWS_AT_ONCE;
      if (LOG_ROWS % ROWS_AT_ONCE == 0 || r < LOG_ROWS)
        place_keys(log_keys, r, log_words[i], common.key_scale + r, 1.f);
    }
  }
  if (tid < COLUMNS) {
    common.row[tid] = my_row;
    common.place[tid] = (u32)(record_base + my_row) * (u32)(value_heads * DIM * (int)sizeof(log_t));
    if (tid >= LOG_ROWS) common.mask[tid - LOG_ROWS] = my_mask;
  }
  __syncthreads();

  if (LOG_BLOCKS > 0) {
    constexpr int LINES = DIM * (int)sizeof(log_t) / 128;
    for (int x = tid; x < length * heads_per_cta * LINES; x += THREADS)
      prefetch(u_records + ((record_base + common.row[x / (heads_per_cta * LINES)]) * value_heads + first_head) * DIM +
               x % (heads_per_cta * LINES) * (128 / (int)sizeof(log_t)));
  }

  // ---- log decays along the paths: one warp per head, pointers jump to the ancestor of the ancestor ----
  if (warp < heads_per_cta) {
    Head& head = heads[warp];
    constexpr int PER_LANE = (COLUMNS + 31) / 32;
    double sum[PER_LANE];
    int up[PER_LANE];
    const int value_head = first_head + warp;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int r = lane + 32 * i, row = r - LOG_ROWS;
      sum[i] = 0, up[i] = -1;
      if (LOG_BLOCKS > 0 && r < length) {
        sum[i] = (double)g_records[(record_base + common.row[r]) * value_heads + value_head];
        up[i] = r - 1;
      } else if (r >= LOG_ROWS && row < rows) {
        sum[i] = (double)head.g[r];
        const u64 above = common.mask[row] & ~(1ull << row);
        up[i] = above ? LOG_ROWS + 63 - __clzll(above) : flush ? -1 : length - 1;
      }
      if (r < COLUMNS) head.G[r] = sum[i], head.up[r] = up[i] < 0 ? NONE : up[i];
    }
    __syncwarp();
    bool more = true;
    while (more) {
      double extra[PER_LANE];
      int next[PER_LANE];
      more = false;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        extra[i] = up[i] >= 0 ? head.G[up[i]] : 0.0;
        next[i] = up[i] >= 0 ? head.up[up[i]] : NONE;
        if (next[i] == NONE) next[i] = -1;
        more |= next[i] >= 0;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        sum[i] += extra[i], up[i] = next[i];
        if (lane + 32 * i < COLUMNS) head.G[lane + 32 * i] = sum[i], head.up[lane + 32 * i] = up[i] < 0 ? NONE : up[i];
      }
      more = __any_sync(0xffffffffu, more);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int r = lane + 32 * i, row = r - LOG_ROWS;
      if (LOG_BLOCKS > 0 && flush && r < LOG_ROWS) {
        const double whole = head.G[length - 1];
        head.fold[r] = r < length ? __expf((float)(whole - sum[i])) * common.key_scale[r] : 0.f;
        if (r == 0) head.fold[LOG_ROWS] = exp_near_one((float)whole);
      } else if (r >= LOG_ROWS && r < COLUMNS) {
        const float from_base = exp_near_one((float)sum[i]), beta = head.beta[row];
        head.in[row] = make_float2(beta, beta * from_base * common.key_scale[r]);
        head.out[row] = from_base * common.query_scale[row];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float first = (float)sum[i];
      if (lane + 32 * i < COLUMNS) *(float2*)&head.G[lane + 32 * i] = make_float2(first, (float)(sum[i] - first));
    }
  }

  // ---- Grams, turned into the weights of every value head ----
  const int used = LOG_BLOCKS == 0 ? 0 : (length + 15) / 16;  // log blocks in use
  const int seen = flush ? 0 : used;                          // log blocks that the tree sees
  {
    const int tasks = BLOCKS * seen + BLOCKS * (BLOCKS + 1) / 2;
    for (int task = warp;; task += WARPS) {
      int block = 0, column = min(task, tasks - 1);
      while (column >= seen + block + 1) column -= seen + ++block;
      const bool is_log = column < seen;
      const int other = is_log ? column : column - seen;
      const u32 key_rows = shared_address(tree_keys + block * 16 * DIM), a_offset = a_key_offset(lane);
      const u32 columns = shared_address((is_log ? log_keys : tree_keys) + other * 16 * DIM), b_offset = b_key_offset(lane);
      float gram[2][2][4] = {};  // of keys and of queries
      const int steps = task < tasks ? K_STEPS : 0;
#pragma unroll 4
      for (int j = 0; j < steps; j++) {
        u32 x[4], y[4], z[4];
        load_matrix4(z, columns + (b_offset ^ (32 * j)));
        load_matrix4(x, key_rows + (a_offset ^ (32 * j)));
        load_matrix4(y, key_rows + 2 * KEY_ROWS * DIM + (a_offset ^ (32 * j)));
        mma(gram[0][0], x, z[0], z[1]);
        mma(gram[1][0], y, z[0], z[1]);
        mma(gram[0][1], x, z[2], z[3]);
        mma(gram[1][1], y, z[2], z[3]);
      }
      if (task == warp) __syncthreads();  // first turn of every warp: the decays are complete
      if (task >= tasks) break;
      const int first_column = is_log ? other * 16 : LOG_ROWS + other * 16;
      const bool diagonal = !is_log && other == block;
      const int pitch = weight_pitch(block);
      for (int h = 0; h < heads_per_cta; h++) {
        Head& head = heads[h];
        u16* L = weights + h * WEIGHT_PARTS * WEIGHT_ELEMENTS + weight_start(block) + first_column;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int in_row = g + 8 * e, row = block * 16 + in_row;
          const u64 mask = is_log ? 0 : common.mask[row] >> (other * 16);
          const float2 G_row = *(const float2*)&head.G[LOG_ROWS + row];
          const float key_row = head.beta[row] * common.key_scale[LOG_ROWS + row], query_row = common.query_scale[row];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float l[2], c[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const int in_column = half * 8 + 2 * t + i;
              const bool sees = is_log ? (other * 16 + in_column < length && row < rows) : (mask >> in_column & 1);
              const float2 G_column = *(const float2*)&head.G[first_column + in_column];
              const float decay = __expf(fminf((G_row.x - G_column.x) + (G_row.y - G_column.y), 0.f));
              const float w = decay * common.key_scale[first_column + in_column];
              l[i] = sees && !(diagonal && in_row == in_column) ? key_row * w * gram[0][half][2 * e + i] : 0.f;
              c[i] = sees ? query_row * w * gram[1][half][2 * e + i] : 0.f;
            }
            u16* place = L + in_row * pitch + half * 8 + 2 * t;
            u32 hi, lo;
            if (diagonal) {
              *(float2*)(diagonal_row(L, in_row, pitch, half) + 2 * t) = make_float2(l[0], l[1]);
            } else {
              u32 least;
              split3(l[0], l[1], hi, lo, least);
              *(u32*)place = hi;
              *(u32*)(place + WEIGHT_ELEMENTS) = lo;
              if (L_PARTS == 3) *(u32*)(place + 4 * WEIGHT_ELEMENTS) = least;
            }
            split2(c[0], c[1], hi, lo);
            *(u32*)(place + 2 * WEIGHT_ELEMENTS) = hi;
            *(u32*)(place + 3 * WEIGHT_ELEMENTS) = lo;
          }
        }
      }
    }
  }
  // Records of the tree rows; what they overwrite is no log row of this launch.
  if (share == 0) {
    for (int x = tid; x < heads_per_cta * rows; x += THREADS) {
      const int h = x / rows, row = x % rows;
      g_records[(record_base + common.row[LOG_ROWS + row]) * value_heads + first_head + h] = heads[h].g[LOG_ROWS + row];
    }
    if (group == 0)
      for (int row = tid / LANES; row < rows; row += ROWS_AT_ONCE)
        *(uint4*)(k_records + ((record_base + common.row[LOG_ROWS + row]) * key_heads + key_head) * DIM + piece * 8) =
            load_keys(tree_keys, row, piece * 8);
  }
  __syncthreads();

  // ---- inverses of the diagonal blocks: a lane per column, T - I stored ----
  for (int x = tid; x < heads_per_cta * BLOCKS * 16; x += THREADS) {
    const int h = x / (BLOCKS * 16), block = x / 16 % BLOCKS, column = x % 16;
    u16* place = weights + h * WEIGHT_PARTS * WEIGHT_ELEMENTS + weight_start(block) + LOG_ROWS + block * 16;
    const int pitch = weight_pitch(block);
    float inverse[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float sum = i == column ? 1.f : 0.f;
#pragma unroll
      for (int j4 = 0; j4 < i; j4 += 4) {
        const float4 l = *(const float4*)(diagonal_row(place, i, pitch, j4 / 8) + j4 % 8);
        sum = fmaf(-l.x, inverse[j4], sum);
        if (j4 + 1 < i) sum = fmaf(-l.y, inverse[j4 + 1], sum);
        if (j4 + 2 < i) sum = fmaf(-l.z, inverse[j4 + 2], sum);
        if (j4 + 3 < i) sum = fmaf(-l.w, inverse[j4 + 3], sum);
      }
      inverse[i] = sum;
    }
    __syncwarp(0xffffu << (lane & 16));  // the 16 lanes of a block have read it
#pragma unroll
    for (int i = 0; i < 16; i++) {
      u32 hi, lo, least;
      split3(i == column ? 0.f : inverse[i], 0.f, hi, lo, least);
      place[i * pitch + column] = (u16)hi;
      place[WEIGHT_ELEMENTS + i * pitch + column] = (u16)lo;
      if (L_PARTS == 3) place[4 * WEIGHT_ELEMENTS + i * pitch + column] = (u16)least;
    }
  }

  // ---- tiles of 16 value rows ----
  const u32 key_address = shared_address(tree_keys), key_offset = b_key_offset(lane);
  const u32 fold_address = shared_address(log_keys), fold_offset = a_key_offset(lane);

  for (int n = 0; n < num_tiles; n++) {
    const int h = head_of(n), value_head = first_head + h;
    const int value = value_row(n) + 2 * g;  // this lane's value rows are value and value + 1
    const Head& head = heads[h];
    // Bytes from the start of an array; the host checks that 32 bits hold them.
    const u32 place = value_head * DIM + value, u_offset = place * (u32)sizeof(log_t);
    const u32 v_offset = 2 * ((u32)first_token * v_pitch + place), out_offset = 2 * ((u32)first_token * value_heads * DIM + place);

    u32 values[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * i + 2 * t + e;
        values[i][e] =
            row < rows ? *(const u32*)((const u8*)v + (v_offset + 2 * row * v_pitch)) : 0u;
      }
    // u of the log as an A operand: log rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each block.
    float2 logged[ONE_LOG][4];
    if (LOG_BLOCKS > 0) {
#pragma unroll
      for (int block = 0; block < LOG_BLOCKS; block++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = block * 16 + 2 * t + (i & 1) + (i >> 1) * 8;
          logged[block][i] = make_float2(0.f, 0.f);
          if (row < length)
            logged[block][i] =
                load_u((const log_t*)((const u8*)u_records + (common.place[row] + u_offset)));
        }
    }

    float from_keys[TILES][4] = {}, from_queries[TILES][4] = {};  // S K^T and S Q^T, raw k and q
    // One k-step of both products; `lo` is absent for a bf16 state.
    auto multiply = [&](const u32(&hi)[4], const u32(&lo)[4], int j) {
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        u32 x[4], y[4];
        const u32 address = key_address + (key_offset ^ (32 * j)) + block * 32 * DIM;
        load_matrix4(x, address);
        load_matrix4(y, address + 2 * KEY_ROWS * DIM);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int tile = 2 * block + half;
          if (tile < TILES) {
            mma(from_keys[tile], hi, x[2 * half], x[2 * half + 1]);
            mma(from_queries[tile], hi, y[2 * half], y[2 * half + 1]);
            if (!STATE_BF16) {
              mma(from_keys[tile], lo, x[2 * half], x[2 * half + 1]);
              mma(from_queries[tile], lo, y[2 * half], y[2 * half + 1]);
            }
          }
        }
      }
    };
    const uint4* pieces = (const uint4*)(memory + warp * STAGE_BYTES) + lane;
    copy_wait_all();
    if (!flush) {
#if STATE_BF16
#pragma unroll
      for (int j = 0; j < K_STEPS; j += 2) {
        const uint4 x = pieces[32 * j], y = pieces[32 * (j + 1)];
        const u32 first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
        multiply(first, first, j);
        multiply(second, second, j + 1);
      }
#else
#pragma unroll K_UNROLL
      for (int j = 0; j < K_STEPS; j++) {
        const uint4 x = pieces[64 * j], y = pieces[64 * j + 32];
        u32 hi[4], lo[4];
        split2(__uint_as_float(x.x), __uint_as_float(x.y), hi[0], lo[0]);
        split2(__uint_as_float(y.x), __uint_as_float(y.y), hi[1], lo[1]);
        split2(__uint_as_float(x.z), __uint_as_float(x.w), hi[2], lo[2]);
        split2(__uint_as_float(y.z), __uint_as_float(y.w), hi[3], lo[3]);
        multiply(hi, lo, j);
      }
#endif
    } else if (LOG_BLOCKS > 0) {
      // Fold the log: S <- e^{G_h} S + sum_j fold_j u_j k_j^T, write it, go on with it.
      const float whole = head.fold[LOG_ROWS];
      u32 part[3][ONE_LOG][4];
#pragma unroll
      for (int block = 0; block < ONE_LOG; block++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = block * 16 + 2 * t + 8 * i;
          const float2 x = logged[block][2 * i], y = logged[block][2 * i + 1];
          const float wx = head.fold[row], wy = head.fold[row + 1];
          split3(wx * x.x, wy * y.x, part[0][block][2 * i], part[1][block][2 * i], part[2][block][2 * i]);
          split3(wx * x.y, wy * y.y, part[0][block][2 * i + 1], part[1][block][2 * i + 1], part[2][block][2 * i + 1]);
        }
      // New values of the lane's part of k-step j: s[0], s[1], s[4], s[5] of its first value row, the others of its second.
      auto fold = [&](float(&s)[8], int j) {
        float left[4] = {}, right[4] = {};
#pragma unroll
        for (int block = 0; block < ONE_LOG; block++)
          if (block < used) {
            u32 keys[4];
            load_matrix4_transposed(keys, fold_address + block * 32 * DIM + (fold_offset ^ (32 * j)));
#pragma unroll
            for (int p = 2; p >= 0; p--) {
              mma_in_order(left, part[p][block], keys[0], keys[1]);
              mma_in_order(right, part[p][block], keys[2], keys[3]);
            }
          }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[i] = fmaf(whole, s[i], left[i]);
          s[4 + i] = fmaf(whole, s[4 + i], right[i]);
        }
      };
      state_t* tile = tile_of(n);
#if STATE_BF16
#pragma unroll 1
      for (int j = 0; j < K_STEPS; j += 2) {
        const uint4 x = pieces[32 * j], y = pieces[32 * (j + 1)];
        float first[8] = {low_half(x.x), high_half(x.x), low_half(y.x), high_half(y.x),
                          low_half(x.y), high_half(x.y), low_half(y.y), high_half(y.y)};
        float second[8] = {low_half(x.z), high_half(x.z), low_half(y.z), high_half(y.z),
                           low_half(x.w), high_half(x.w), low_half(y.w), high_half(y.w)};
        fold(first, j);
        fold(second, j + 1);
        const u32 one[4] = {pack_bf16(first[0], first[1]), pack_bf16(first[2], first[3]), pack_bf16(first[4], first[5]),
                            pack_bf16(first[6], first[7])};
        const u32 two[4] = {pack_bf16(second[0], second[1]), pack_bf16(second[2], second[3]),
                            pack_bf16(second[4], second[5]), pack_bf16(second[6], second[7])};
        *(uint4*)(tile + (2 * g) * DIM + 16 * j + 8 * t) = make_uint4(one[0], one[2], two[0], two[2]);
        *(uint4*)(tile + (2 * g + 1) * DIM + 16 * j + 8 * t) = make_uint4(one[1], one[3], two[1], two[3]);
        multiply(one, one, j);
        multiply(two, two, j + 1);
      }
#else
#pragma unroll 2
      for (int j = 0; j < K_STEPS; j++) {
        const float4 x = *(const float4*)(pieces + 64 * j), y = *(const float4*)(pieces + 64 * j + 32);
        float s[8] = {x.x, x.y, y.x, y.y, x.z, x.w, y.z, y.w};
        fold(s, j);
        *(float4*)(tile + (2 * g) * DIM + 16 * j + 4 * t) = make_float4(s[0], s[1], s[4], s[5]);
        *(float4*)(tile + (2 * g + 1) * DIM + 16 * j + 4 * t) = make_float4(s[2], s[3], s[6], s[7]);
        u32 hi[4], lo[4];
        split2(s[0], s[1], hi[0], lo[0]);
        split2(s[2], s[3], hi[1], lo[1]);
        split2(s[4], s[5], hi[2], lo[2]);
        split2(s[6], s[7], hi[3], lo[3]);
        multiply(hi, lo, j);
      }
#endif
    }
    if (n + 1 < num_tiles) copy_tile(stage, tile_of(n + 1), lane);
    if (n == 0) __syncthreads();  // the weights are complete

    // ---- solve M U = R block by block, outputs on the way ----
    const u32 weight_address = shared_address(weights + h * WEIGHT_PARTS * WEIGHT_ELEMENTS);
    Parts log_u[ONE_LOG], tree_u[BLOCKS];
    if (LOG_BLOCKS > 0) {
#pragma unroll
      for (int block = 0; block < LOG_BLOCKS; block++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 x = logged[block][2 * i], y = logged[block][2 * i + 1];
          Parts& parts = log_u[block];
          split3(x.x, y.x, parts.hi[2 * i], parts.mid[2 * i], parts.lo[2 * i]);
          split3(x.y, y.y, parts.hi[2 * i + 1], parts.mid[2 * i + 1], parts.lo[2 * i + 1]);
        }
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      constexpr int LAST = TILES - 2 * (BLOCKS - 1);  // tiles of the last block
      const u32 L_row = weight_address + 2 * (weight_start(block) + b_block_offset(lane, weight_pitch(block)));
      const u32 C_row = L_row + 4 * WEIGHT_ELEMENTS;
      float u[2][4] = {}, sum[2][4] = {}, o[2][4] = {};
      auto gather_u = [&](float(&c)[2][4], const Parts& parts, u32 address) {
        if (block == BLOCKS - 1) accumulate<LAST, true>(c, parts, address);
        else accumulate<2, true>(c, parts, address);
      };
      auto gather_o = [&](float(&c)[2][4], const Parts& parts, u32 address) {
        if (block == BLOCKS - 1) accumulate<LAST, false>(c, parts, address);
        else accumulate<2, false>(c, parts, address);
      };
      if (LOG_BLOCKS > 0) {
#pragma unroll
        for (int i = 0; i < LOG_BLOCKS; i++)
          if (i < seen) {
            gather_u(sum, log_u[i], L_row + 32 * i);
            gather_o(o, log_u[i], C_row + 32 * i);
          }
      }
#pragma unroll
      for (int i = 0; i < block; i++) {
        gather_u(sum, tree_u[i], L_row + 2 * LOG_ROWS + 32 * i);
        gather_o(o, tree_u[i], C_row + 2 * LOG_ROWS + 32 * i);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int tile = 2 * block + half;
        if (tile >= TILES) continue;
        const float4 in = *(const float4*)&head.in[8 * tile + 2 * t];
        u[half][0] = fmaf(in.x, low_half(values[tile][0]), -fmaf(in.y, from_keys[tile][0], sum[half][0]));
        u[half][1] = fmaf(in.z, low_half(values[tile][1]), -fmaf(in.w, from_keys[tile][1], sum[half][1]));
        u[half][2] = fmaf(in.x, high_half(values[tile][0]), -fmaf(in.y, from_keys[tile][2], sum[half][2]));
        u[half][3] = fmaf(in.z, high_half(values[tile][1]), -fmaf(in.w, from_keys[tile][3], sum[half][3]));
      }
      split_block(u, tree_u[block]);
      float correction[2][4] = {};
      gather_u(correction, tree_u[block], L_row + 2 * LOG_ROWS + 32 * block);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 4; i++) u[half][i] += correction[half][i];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int tile = 2 * block + half;
        if (tile >= TILES) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = 8 * tile + 2 * t + e;
          if (row < rows)
            store_u((log_t*)((u8*)u_records + (common.place[LOG_ROWS + row] + u_offset)), u[half][e], u[half][2 + e]);
        }
      }
      split_block(u, tree_u[block]);

      gather_o(o, tree_u[block], C_row + 2 * LOG_ROWS + 32 * block);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int tile = 2 * block + half;
        if (tile >= TILES) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int row = 8 * tile + 2 * t + e;
          const float out = head.out[row];
          if (row < rows)
            *(u32*)((u8*)output + (out_offset + 2 * row * value_heads * DIM)) =
                pack_bf16(fmaf(out, from_queries[tile][e], o[half][e]),
                          fmaf(out, from_queries[tile][2 + e], o[half][2 + e]));
        }
      }
    }
  }
}
