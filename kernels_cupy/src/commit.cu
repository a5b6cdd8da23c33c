// Fold committed rows into dense states, for all layers in one launch: S <- e^{G} S + sum_j e^{G - G_j} u_j k_j^T.
//
// The rows are the path to an accepted node (bole: `accepted` given; tree row t is record row t), or a request's log
// (flush: `accepted` is null; row_list[b, 0 .. log_length[b])). A request with no rows is left alone.
//
// Thread mapping. One CTA of 4 warps per value head, request and layer. A warp updates
// tiles of 16 value rows x 64 keys as MMA accumulators; lane 4 g + t owns value rows 2 g, 2 g + 1 and, of every 16 keys,
// four neighbours (see key_position), so that state loads and stores are 16 bytes (8 for bf16).
// The update is a rank-h product on tensor cores, u in three bf16 parts (24 bits), k exact, summed apart from S.
// Shared memory: the keys of the rows and their weights. Traffic per head: S read and written, h rows of u, k.
#include "common.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, MAX_ROWS = 128;

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
  state_t* state = (state_t*)layer.state + ((i64)slot * value_heads + value_head) * DIM * DIM +
                   (i64)(warp * 16 + 2 * g) * DIM;

  {  // the whole head is on its way to the L2 cache while keys and weights are prepared
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
      float sum = sum_of_squares(words);
#pragma unroll
      for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
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
  const u32 key_address = shared_address(keys), key_offset = a_key_offset(lane);

  constexpr int GROUP = 4;  // k-steps in registers at a time
#pragma unroll 1
  for (int n = 0; n < DIM / (16 * WARPS) * (K_STEPS / GROUP); n++) {
    const int first_row = n / (K_STEPS / GROUP) * 16 * WARPS, first_step = n % (K_STEPS / GROUP) * GROUP;
    state_t* tile = state + (i64)first_row * DIM + 16 * first_step;
    const log_t* u = u_records + first_row + warp * 16 + 2 * g;
    float s[GROUP][8];
#pragma unroll
    for (int j = 0; j < GROUP; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#if STATE_BF16
        const uint2 x = *(const uint2*)(tile + e * DIM + 32 * (j / 2) + 8 * t + 4 * (j & 1));
        s[j][2 * e] = low_half(x.x), s[j][2 * e + 1] = high_half(x.x);
        s[j][4 + 2 * e] = low_half(x.y), s[j][4 + 2 * e + 1] = high_half(x.y);
#else
        const float4 x = __ldcs((const float4*)(tile + e * DIM + 16 * j + 4 * t));
        s[j][2 * e] = x.x, s[j][2 * e + 1] = x.y, s[j][4 + 2 * e] = x.z, s[j][4 + 2 * e + 1] = x.w;
#endif
      }
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
      u32 part[3][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = block * 16 + 2 * t + 8 * i;
        float2 x = make_float2(0.f, 0.f), y = x;
        if (r < length) x = load_u(u + (i64)rows[r] * value_heads * DIM);
        if (r + 1 < length) y = load_u(u + (i64)rows[r + 1] * value_heads * DIM);
        const float wx = weight[r], wy = weight[r + 1];
        split3(wx * x.x, wy * y.x, part[0][2 * i], part[1][2 * i], part[2][2 * i]);
        split3(wx * x.y, wy * y.y, part[0][2 * i + 1], part[1][2 * i + 1], part[2][2 * i + 1]);
      }
      const float factor = block == 0 ? whole : 1.f;
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        u32 b[4];
        load_matrix4_transposed(b, key_address + block * 32 * DIM + (key_offset ^ (32 * (first_step + j))));
        float left[4] = {}, right[4] = {};
#pragma unroll
        for (int p = 2; p >= 0; p--) {
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
#pragma unroll
    for (int j = 0; j < GROUP; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#if STATE_BF16
        *(uint2*)(tile + e * DIM + 32 * (j / 2) + 8 * t + 4 * (j & 1)) =
            make_uint2(pack_bf16(s[j][2 * e], s[j][2 * e + 1]), pack_bf16(s[j][4 + 2 * e], s[j][4 + 2 * e + 1]));
#else
        __stcs((float4*)(tile + e * DIM + 16 * j + 4 * t),
               make_float4(s[j][2 * e], s[j][2 * e + 1], s[j][4 + 2 * e], s[j][4 + 2 * e + 1]));
#endif
      }
  }
}
