// The gated delta rule row by row, a state kept for every row: plain decoding (recurrent) and storeall.
//
// Row t starts from the state of its parent and writes its own into the slot that write_slots[b, t] names (a negative
// slot keeps nothing). recurrent: one row, written over the slot it read. storeall chain: every row has a slot of the
// pool, commit is by index. storeall tree: rows write into a buffer of one state per row, a parent that is not the row
// before is loaded back, and `scatter_states` copies the accepted state to the pool for all layers in one launch.
//
// Thread mapping. One CTA of 4 warps per request, value head and 64 value rows. Eight lanes share a value row (DIM / 8 keys
// each, in 16-byte pieces); a lane holds 4 value rows, a warp 16, all in registers. fp32 FMA throughout.
// Traffic per request and head: DIM^2 elements of S read, N DIM^2 written (and up to N read on a tree), q, k, v, o.
#include "common.cuh"

constexpr int PIECES = DIM / 32;    // pieces of 4 keys per lane
constexpr int ROWS_PER_LANE = 4, THREADS = 128;

DEVICE void load_state(float (&s)[ROWS_PER_LANE][PIECES][4], const state_t* tile) {
#pragma unroll
  for (int r = 0; r < ROWS_PER_LANE; r++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#if STATE_BF16
      const uint2 x = *(const uint2*)(tile + r * DIM + 32 * i);
      s[r][i][0] = low_half(x.x), s[r][i][1] = high_half(x.x), s[r][i][2] = low_half(x.y), s[r][i][3] = high_half(x.y);
#else
      const float4 x = *(const float4*)(tile + r * DIM + 32 * i);
      s[r][i][0] = x.x, s[r][i][1] = x.y, s[r][i][2] = x.z, s[r][i][3] = x.w;
#endif
    }
}

DEVICE void store_state(const float (&s)[ROWS_PER_LANE][PIECES][4], state_t* tile) {
#pragma unroll
  for (int r = 0; r < ROWS_PER_LANE; r++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#if STATE_BF16
      *(uint2*)(tile + r * DIM + 32 * i) = make_uint2(pack_bf16(s[r][i][0], s[r][i][1]), pack_bf16(s[r][i][2], s[r][i][3]));
#else
      *(float4*)(tile + r * DIM + 32 * i) = make_float4(s[r][i][0], s[r][i][1], s[r][i][2], s[r][i][3]);
#endif
    }
}

// This lane's keys of one row, normalised; pieces of 4 at columns 4 lane + 32 i.
DEVICE void load_normalised(float (&x)[PIECES][4], const u16* row, float factor, float norm_eps) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const uint2 w = *(const uint2*)(row + 32 * i);
    x[i][0] = low_half(w.x), x[i][1] = high_half(w.x), x[i][2] = low_half(w.y), x[i][3] = high_half(w.y);
#pragma unroll
    for (int c = 0; c < 4; c++) sum = fmaf(x[i][c], x[i][c], sum);
  }
  const float scale = factor / sqrtf(sum_over<8>(sum) + norm_eps);
#pragma unroll
  for (int i = 0; i < PIECES; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) x[i][c] *= scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
recur(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
      int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
      const float* __restrict__ A_log, const float* __restrict__ dt_bias, const int* __restrict__ parent,
      int parent_pitch, const state_t* read_pool, const int* __restrict__ read_slots, int read_pitch,
      state_t* write_pool, const int* __restrict__ write_slots, int write_pitch, u16* __restrict__ output, int rows,
      int key_heads, int value_heads, float norm_eps) {
  const int request = blockIdx.y, tid = threadIdx.x, lane = tid & 7;
  const int share = blockIdx.x % (DIM / 64), value_head = blockIdx.x / (DIM / 64);
  const int key_head = value_head / (value_heads / key_heads);
  const int value = share * 64 + tid / 8 * ROWS_PER_LANE;  // first of this lane's value rows
  const int slot = read_slots[(i64)request * read_pitch];
  if (slot < 0) {
    wait_for_launch_before();
    return;
  }
  const i64 state_size = (i64)value_heads * DIM * DIM;
  const i64 offset = ((i64)value_head * DIM + value) * DIM + 4 * lane;

  float s[ROWS_PER_LANE][PIECES][4];
  load_state(s, read_pool + slot * state_size + offset);
  const float A = A_log[value_head], bias = dt_bias[value_head];
  wait_for_launch_before();
  written_before(q), written_before(k), written_before(v), written_before(a), written_before(b);
  for (int row = 0; row < rows; row++) {
    if (row > 0 && parent) {
      const int above = parent[(i64)request * parent_pitch + row];
      if (above != row - 1) {  // this thread wrote what it reads here
        const int from = write_slots[(i64)request * write_pitch + above];
        if (from < 0) return;  // the parent's state was not kept
        load_state(s, write_pool + from * state_size + offset);
      }
    }
    const i64 token = (i64)request * rows + row;
    float key[PIECES][4], query[PIECES][4];
    load_normalised(key, k + token * k_pitch + key_head * DIM + 4 * lane, 1.f, norm_eps);
    load_normalised(query, q + token * q_pitch + key_head * DIM + 4 * lane, DIM == 128 ? 0.08838834764831845f : 0.125f,
                    norm_eps);
    const uint2 w = *(const uint2*)(v + token * v_pitch + value_head * DIM + value);
    const float values[4] = {low_half(w.x), high_half(w.x), low_half(w.y), high_half(w.y)};
    const i64 gate = token * value_heads + value_head;
    const float decay = exp_near_one(log_decay(gate_value(load_gate(a, gate, gates_bf16), gates_bf16), A, bias));
    const float beta = sigmoid(gate_value(load_gate(b, gate, gates_bf16), gates_bf16));
    float out[ROWS_PER_LANE];
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < PIECES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          s[r][i][c] *= decay;
          dot = fmaf(s[r][i][c], key[i][c], dot);
        }
      const float u = beta * (values[r] - sum_over<8>(dot));
      dot = 0.f;
#pragma unroll
      for (int i = 0; i < PIECES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          s[r][i][c] = fmaf(u, key[i][c], s[r][i][c]);
          dot = fmaf(s[r][i][c], query[i][c], dot);
        }
      out[r] = sum_over<8>(dot);
    }
    if (lane == 0)
      *(uint2*)(output + (token * value_heads + value_head) * DIM + value) =
          make_uint2(pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3]));
    const int target = write_slots[(i64)request * write_pitch + row];
    if (target >= 0) store_state(s, write_pool + target * state_size + offset);
  }
}

struct StorePair {  // one per layer, in device memory
  u64 node_states, pool;
};

// pool[slots[b]] <- node_states[b, accepted[b]] for all layers; one CTA per 16 KB, request and layer.
extern "C" __global__ void scatter_states(const StorePair* __restrict__ layers, const int* __restrict__ slots,
                                          const int* __restrict__ accepted, int rows, i64 state_bytes) {
  const int request = blockIdx.y, slot = slots[request], node = accepted[request];
  if (slot < 0 || node < 0 || node >= rows) return;
  const StorePair layer = layers[blockIdx.z];
  const uint4* from = (const uint4*)(layer.node_states + ((i64)request * rows + node) * state_bytes);
  uint4* to = (uint4*)(layer.pool + slot * state_bytes);
  const i64 first = (i64)blockIdx.x * 1024 + threadIdx.x, last = state_bytes / 16;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (first + 128 * i < last) to[first + 128 * i] = from[first + 128 * i];
}
