// Fold committed rows into dense states, for all layers in one launch: S <- e^{G} S + sum_j e^{G - G_j} u_j k_j^T.
//
// The rows are the path to an accepted node (bole: `accepted` given; tree row t is record row t), or a request's log
// (flush: `accepted` is null; row_list[b, 0 .. log_length[b])). A request with no rows is left alone.
//
// Thread mapping. One CTA of 4 warps per value head, request and layer. A warp updates
// tiles of 16 value rows x 64 keys as MMA accumulators; lane 4 g + t owns value rows 2 g, 2 g + 1 and, of every 16 keys,
// four (bf16: of every 32, eight) neighbours (see key_position), so that state loads and stores are 16 bytes.
// The update is a rank-h product on tensor cores, u in bf16 parts, k exact, summed apart from S. The first tile is loaded
// before keys and weights are ready, a bf16 tile while the one before is at work.
// Shared memory: the keys of the rows and their weights. Traffic per head: S read and written, h rows of u, k.
#include "common.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, MAX_ROWS = 128;
constexpr int GROUP = 4;                          // k-steps in registers at a time
constexpr int PIECE = 16 / (int)sizeof(state_t);  // elements of a 16-byte piece of a state row
constexpr int PIECES = 16 * GROUP / (4 * PIECE);  // pieces of a lane in each of its two rows
constexpr int FOLD_PARTS = STATE_BF16 ? 2 : 3;    // bf16 parts of u: 17 bits end in a bf16 state, 24 in a float

DEVICE void load_pieces(uint4 (&x)[2][PIECES], const state_t* tile) {
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) x[e][p] = __ldcs((const uint4*)(tile + e * DIM + 4 * PIECE * p));
}

// s[j] holds the lane's four keys of k-step j: two of each row, then the other two of each.
DEVICE void unpack(float (&s)[GROUP][8], const uint4 (&x)[2][PIECES]) {
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const uint4 w = x[e][p];
#if STATE_BF16
      float *first = s[2 * p] + 2 * e, *second = s[2 * p + 1] + 2 * e;
      first[0] = low_half(w.x), first[1] = high_half(w.x), first[4] = low_half(w.y), first[5] = high_half(w.y);
      second[0] = low_half(w.z), second[1] = high_half(w.z), second[4] = low_half(w.w), second[5] = high_half(w.w);
#else
      float* keys = s[p] + 2 * e;
      keys[0] = __uint_as_float(w.x), keys[1] = __uint_as_float(w.y);
      keys[4] = __uint_as_float(w.z), keys[5] = __uint_as_float(w.w);
#endif
    }
}

DEVICE void store_pieces(state_t* tile, const float (&s)[GROUP][8]) {
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#if STATE_BF16
      const float *first = s[2 * p] + 2 * e, *second = s[2 * p + 1] + 2 * e;
      const uint4 w = make_uint4(pack_bf16(first[0], first[1]), pack_bf16(first[4], first[5]),
                                 pack_bf16(second[0], second[1]), pack_bf16(second[4], second[5]));
#else
      const float* keys = s[p] + 2 * e;
      const uint4 w = make_uint4(__float_as_uint(keys[0]), __float_as_uint(keys[1]), __float_as_uint(keys[4]),
                                 __float_as_uint(keys[5]));
#endif
      __stcs((uint4*)(tile + e * DIM + 4 * PIECE * p), w);
    }
}

// Weighted u of 16 rows as an A operand; `r` is the first of the lane's rows.
DEVICE void load_parts(u32 (&part)[FOLD_PARTS][4], const log_t* u, const int* rows, const float* weight, int value_heads,
                       int length, int r) {
#pragma unroll
  for (int i = 0; i < 2; i++, r += 8) {
    float2 x = make_float2(0.f, 0.f), y = x;
    if (r < length) x = load_u(u + (i64)rows[r] * value_heads * DIM);
    if (r + 1 < length) y = load_u(u + (i64)rows[r + 1] * value_heads * DIM);
    const float wx = weight[r], wy = weight[r + 1];
#if STATE_BF16
    split2(wx * x.x, wy * y.x, part[0][2 * i], part[1][2 * i]);
    split2(wx * x.y, wy * y.y, part[0][2 * i + 1], part[1][2 * i + 1]);
#else
    split3(wx * x.x, wy * y.x, part[0][2 * i], part[1][2 * i], part[2][2 * i]);
    split3(wx * x.y, wy * y.y, part[0][2 * i + 1], part[1][2 * i + 1], part[2][2 * i + 1]);
#endif
  }
}

// s <- factor s + u k^T of one block of 16 rows; `keys` is the lane's shared address of the block's first k-step.
DEVICE void fold_block(float (&s)[GROUP][8], const u32 (&part)[FOLD_PARTS][4], float factor, u32 keys) {
#pragma unroll
  for (int j = 0; j < GROUP; j++) {
    u32 b[4];
    load_matrix4_transposed(b, keys ^ (32 * j));
    float left[4] = {}, right[4] = {};
#pragma unroll
    for (int p = FOLD_PARTS - 1; p >= 0; p--) {
      mma(left, part[p], b[0], b[1]);
      mma(right, part[p], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[j][i] = fmaf(factor, s[j][i], left[i]);
      s[j][4 + i] = fmaf(factor, s[j][4 + i], right[i]);
    }
  }
}

struct Layer {  // one per layer, in device memory
  u64 state, u_records, k_records, g_records;
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
fold_rows(const Layer* __restrict__ layers, const int* __restrict__ slots, int record_rows,
          const int* __restrict__ log_length, const int* __restrict__ row_list, const int* __restrict__ accepted,
          const u64* __restrict__ masks, int mask_pitch, int tree_rows, int key_heads, int value_heads,
          float norm_eps) {
  const int request = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, t = lane & 3;
  const int value_head = blockIdx.x;
  const int key_head = value_head / (value_heads / key_heads);
  const int slot = slots[request];
  if (slot < 0) return;

  int length;
  u64 path = 0;
  if (accepted) {
    const int node = accepted[request];
    path = node >= 0 && node < tree_rows ? masks[(i64)request * mask_pitch + node] : 0;
    length = __popcll(path);
  } else {
    length = log_length[request];
  }
  if (length == 0) return;

  const Layer layer = layers[blockIdx.z];
  const log_t* u_records = (const log_t*)layer.u_records + (i64)value_head * DIM;
  const u16* k_records = (const u16*)layer.k_records;
  const float* g_records = (const float*)layer.g_records;
  state_t* tile = (state_t*)layer.state + ((i64)slot * value_heads + value_head) * DIM * DIM +
                  (i64)(warp * 16 + 2 * g) * DIM + PIECE * t;

  uint4 ahead[2][PIECES];  // the state of the next tile, and the rest of the head on its way to the L2 cache
  load_pieces(ahead, tile);
  {
    const u8* head = (const u8*)((const state_t*)layer.state + ((i64)slot * value_heads + value_head) * DIM * DIM);
#pragma unroll
    for (int i = 0; i < DIM * DIM * (int)sizeof(state_t) / (128 * THREADS); i++)
      prefetch(head + (i * THREADS + tid) * 128);
  }

  extern __shared__ __align__(128) u8 memory[];
  u16* keys = (u16*)memory;
  __shared__ float decay[MAX_ROWS], weight[MAX_ROWS + 16], scale[MAX_ROWS];
  __shared__ int rows[MAX_ROWS];
  if (accepted) {
    if (tid < 64 && (path >> tid & 1)) rows[__popcll(path & ((1ull << tid) - 1))] = request * record_rows + tid;
  } else if (tid < length) {
    rows[tid] = request * record_rows + row_list[(i64)request * record_rows + tid];
  }
  __syncthreads();
  const int blocks = (length + 15) / 16;
  {
    constexpr int LANES = DIM / 8;
    const int piece = tid % LANES;
#pragma unroll 1
    for (int r = tid / LANES; r < 16 * blocks; r += THREADS / LANES) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (r < length) words = *(const uint4*)(k_records + ((i64)rows[r] * key_heads + key_head) * DIM + piece * 8);
      const float sum = sum_over<LANES>(sum_of_squares(words));
      store_keys(keys, r, piece * 8, words);
      if (piece == 0) scale[r] = rsqrtf(sum + norm_eps);
    }
  }
  if (tid < length) decay[tid] = g_records[(i64)rows[tid] * value_heads + value_head];
  __syncthreads();
  if (tid <= 16 * blocks) {
    float later = 0.f;  // a sum of what is left, not a difference of sums: float is enough
    const int first = tid == 16 * blocks ? 0 : tid + 1;  // the last entry is the weight of S itself
#pragma unroll 4
    for (int i = first; i < length; i++) later += decay[i];
    weight[tid] = exp_near_one(later) * (tid == 16 * blocks ? 1.f : tid < length ? scale[tid] : 0.f);
  }
  __syncthreads();
  const float whole = weight[16 * blocks];
  const u32 key_address = shared_address(keys) + a_key_offset(lane);
  constexpr int GROUPS = K_STEPS / GROUP, TILES = DIM / (16 * WARPS) * GROUPS;
  const log_t* u = u_records + warp * 16 + 2 * g;
  u32 first_part[FOLD_PARTS][4];
#pragma unroll 1
  for (int n = 0; n < TILES; n++) {
    const int group = n % GROUPS;
    if (n > 0 && group == 0) u += 16 * WARPS;
    if (!STATE_BF16 || group == 0)  // registers of an fp32 tile leave no room to keep them
      load_parts(first_part, u, rows, weight, value_heads, length, 2 * t);
    float s[GROUP][8];
    unpack(s, ahead);
    state_t* next = tile + (group < GROUPS - 1 ? 16 * GROUP : 16 * WARPS * DIM - 16 * GROUP * (GROUPS - 1));
    if (STATE_BF16 && n + 1 < TILES) load_pieces(ahead, next);  // packed pieces leave registers for a second tile
    fold_block(s, first_part, whole, key_address + 32 * GROUP * group);
#pragma unroll 1
    for (int block = 1; block < blocks; block++) {
      u32 part[FOLD_PARTS][4];
      load_parts(part, u, rows, weight, value_heads, length, block * 16 + 2 * t);
      fold_block(s, part, 1.f, key_address + block * 32 * DIM + 32 * GROUP * group);
    }
    store_pieces(tile, s);
    if (!STATE_BF16 && n + 1 < TILES) load_pieces(ahead, next);
    tile = next;
  }
}
