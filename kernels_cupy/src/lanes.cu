// Verification of one or two tree rows over a dense state and a log of at most 16 committed rows, in fp32 lanes.
//
// Computes what verify.cu computes (the equations are there), for plain decoding and for chains and trees of two rows.
// These have so few columns that tensor cores would multiply padding: here a warp loads a tile of TILE_ROWS value rows
// straight into registers, multiplies by keys and queries there, and adds up across its lanes. No state passes through
// shared memory, and a launch has at most one barrier.
//
// Lanes. A lane holds 16 bytes of a value row, KEYS keys; LANES_OF_ROW neighbours hold the row. The tile's rows stand in
// four quarters: register [c][i] is row i of quarter (lane / 8) ^ c. So whichever 128-byte line a lane reads, what it keeps
// when it shares sums with lane ^ 16 or lane ^ 8 are the same registers for all lanes, and none has to be selected.
// Sums. Lanes exchange the halves that the other keeps: over 16, then 8, then (with a selection) 4, 2 and 1, until each
// lane has one row's S k and S q, and with them u and o.
// Log. After the exchange over 16 a lane adds (weight of log row j) u_j for the rows that it has left, j = lane % 16: the
// sum over the log is the same sum over lanes. Weights are e^(G_t - G_j) k_j.k_t / (|k_j| |k_t|) and the same with q_t. The
// dots are made once per CTA, some log rows by each warp, and pass through shared memory.
// Flush. S <- e^{G_h} S + sum_j fold_j u_j k_j^T in registers, written, and gone on with (rounded, if the state is bf16).
//
// Shared memory, with a log only: dots; then, for a flush, keys of the log and, for each warp, fold_j u_j of its tile.
// Order. All loads that need no other go first; then keys of the log, the tile and u of the log as soon as slot, length
// and row list are there. Gates, norms and decays are made in the shadow of these loads. The next tile is asked for when
// the present one has been multiplied.
// Occupancy: a tile is 16 TILE_ROWS bytes of each lane's registers (half of it with a bf16 state); MIN_CTAS bounds the rest.
// Precision: everything in fp32. Sums of log decays are sums of numbers of one sign up to the row itself, never
// differences: an exponent is off by its own rounding only.
// Nothing here needs an instruction newer than those of sm_80.
#include "common.cuh"

#ifndef ROWS  // tree rows: 1 or 2
#define ROWS 1
#endif
#ifndef LOG_BLOCKS  // 0, or 1 for a log of up to 16 rows
#define LOG_BLOCKS 1
#endif
#ifndef WARPS  // a power of two
#define WARPS 4
#endif
#ifndef TILE_ROWS  // 4, 8, 16 or 32
#define TILE_ROWS 16
#endif
#ifndef TILES  // of a warp, one after the other
#define TILES 1
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif

constexpr int THREADS = 32 * WARPS, LOG_ROWS = 16;
constexpr int KEYS = 16 / (int)sizeof(state_t), WORDS = KEYS / 2;        // of a lane: state elements; words of a bf16 row
constexpr int LANES_OF_ROW = DIM / KEYS, ROWS_AT_ONCE = 32 / LANES_OF_ROW;  // of a load of the warp
constexpr int QUARTER = TILE_ROWS / 4;                                   // value rows
constexpr int CLASSES = 4 / ROWS_AT_ONCE;                                // quarters of which a lane holds a part
constexpr int LOG_CLASSES = CLASSES < 2 ? CLASSES : 2, LOG_LANES = 8 * LOG_CLASSES;  // when the log is added
constexpr int LOG_OF_LANE = LOG_ROWS / LOG_LANES;
constexpr int COLUMNS = 2 * ROWS;                                        // key of row 0, its query, key of row 1, its query
constexpr int SELF = COLUMNS;                                            // |k_j|^2 among the dots of log row j
constexpr int COPIES = 8 / QUARTER;                                      // lanes that end with the same value row
constexpr int U_WORDS = QUARTER * (int)sizeof(log_t) > 4 ? QUARTER * (int)sizeof(log_t) / 4 : 1;
static_assert(DIM % (TILE_ROWS * TILES) == 0 && TILE_ROWS >= 4 && TILE_ROWS <= 32, "tiles of a warp are of one head");

constexpr int DOTS_BYTES = LOG_BLOCKS ? (COLUMNS + 1) * LOG_ROWS * 4 : 0;
constexpr int KEYS_BYTES = LOG_BLOCKS ? LOG_ROWS * DIM * 2 : 0;
constexpr int FOLD_BYTES = LOG_BLOCKS ? LOG_ROWS * TILE_ROWS * 4 : 0;    // of a warp
#ifdef EXPECTED_SHARED_BYTES
static_assert(DOTS_BYTES + KEYS_BYTES + WARPS * FOLD_BYTES == EXPECTED_SHARED_BYTES, "LanesPlan.shared_bytes");
#endif

// Loads that stay where they are written: the order of a launch's first loads is what a small batch waits for.
DEVICE u32 load2(const void* p) {
  u16 x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p));
  return x;
}
DEVICE u32 load4(const void* p) {
  u32 x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
// A gate as it is stored, without a branch: its low half, and its high half if there is one.
DEVICE u32 load_gate_halves(const void* gates, u32 index, int gates_bf16) {
  const u8* first = (const u8*)gates + (gates_bf16 ? 2 * index : 4 * index);
  const u32 low = load2(first), high = load2(first + (gates_bf16 ? 0 : 2));
  return gates_bf16 ? low : low | high << 16;
}
// `N` words.
template <int N>
DEVICE void load_words(u32 (&x)[N], const void* p) {
  if constexpr (N == 1) {
    x[0] = load4(p);
  } else if constexpr (N == 2) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p));
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3]) : "l"((const u32*)p + i));
  }
}
// 16 bytes of a state: read once, so the L1 cache does not keep them.
DEVICE void load_state(u32 (&x)[4], const void* p) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p));
}

// Its own instruction, since the compiler would make four of it.
DEVICE void store_state(void* p, const u32 (&x)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
}

DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Element i of consecutive bf16 numbers.
DEVICE float element(const u32* words, int i) { return i & 1 ? high_half(words[i / 2]) : low_half(words[i / 2]); }
// Number i of a lane's piece of a state.
DEVICE float state_element(const u32 (&words)[4], int i) {
  return STATE_BF16 ? element(words, i) : __uint_as_float(words[i & 3]);
}
// u of value row i of a quarter.
DEVICE float u_element(const u32 (&words)[U_WORDS], int i) {
  return LOG_BF16 ? element(words, i) : __uint_as_float(words[i % U_WORDS]);
}

// Sums over 2 `TOP` neighbouring lanes of N rows of V values; afterwards x[.][0] is that of row (lane % (2 TOP)) / (2 TOP / N).
template <int TOP, int V, int N>
DEVICE void add_up(float (&x)[V][N], int lane) {
  int n = N;
#pragma unroll
  for (int mask = TOP; mask > 0; mask /= 2) {
    const bool upper = lane & mask;
    n /= 2;
#pragma unroll
    for (int v = 0; v < V; v++) {
      if (n == 0) x[v][0] += exchange(x[v][0], mask);
#pragma unroll
      for (int i = 0; i < n; i++) {
        const float kept = upper ? x[v][i + n] : x[v][i], sent = upper ? x[v][i] : x[v][i + n];
        x[v][i] = kept + exchange(sent, mask);
      }
    }
  }
}

// grid: (CTAs of a key head, key heads, requests)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify_lanes(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
             int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
             const float* __restrict__ A_log, const float* __restrict__ dt_bias, const u64* __restrict__ masks,
             int mask_pitch, state_t* state, const int* __restrict__ slots, log_t* u_records, u16* k_records,
             float* g_records, int record_rows, const int* __restrict__ log_length, const int* __restrict__ row_list,
             u16* __restrict__ output, int rows, int key_heads, int value_heads, int group, int capacity, int reserve,
             float norm_eps) {
  const int request = blockIdx.z, key_head = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int quarter = lane >> 3, piece = lane % LANES_OF_ROW * KEYS;
  const int row_of_lane = quarter * QUARTER + (lane & 7) / COPIES;  // value row of the tile that the lane ends with
  const int my_row = ROWS == 1 ? 0 : lane & 1;                       // tree row whose gates the lane makes
  const int warp_row = (blockIdx.x * WARPS + warp) * TILES * TILE_ROWS;  // counted from the first of the key head
  const int value_head = key_head * group + warp_row / DIM, first_row = warp_row % DIM;
  // Offsets in 32 bits: the host checks that no array but the state's has 4 GiB.
  const u32 record_base = request * record_rows, first_token = request * ROWS;

  // ---- loads that need no other ----
  const int slot = load4(slots + request);
  int length = 0, listed = lane;  // the first rows of the row list are those of the log, the next those of the tree
  float stored_decay = 0.f;       // of record row `lane`, in the log or not: a request has no more than 18
  if (LOG_BLOCKS) {
    length = load4(log_length + request);
    if (lane < record_rows) {
      listed = load4(row_list + (record_base + lane));
      stored_decay = __uint_as_float(load4(g_records + ((record_base + lane) * value_heads + value_head)));
    }
  }
  u32 key_words[ROWS][WORDS], query_words[ROWS][WORDS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    load_words(key_words[t], k + ((first_token + t) * (u32)k_pitch + key_head * DIM + piece));
    load_words(query_words[t], q + ((first_token + t) * (u32)q_pitch + key_head * DIM + piece));
  }
  const u32 gate = (first_token + my_row) * value_heads + value_head;
  const u32 a_bits = load_gate_halves(a, gate, gates_bf16), b_bits = load_gate_halves(b, gate, gates_bf16);
  const u32 A_bits = load4(A_log + value_head), bias_bits = load4(dt_bias + value_head);
  const bool above = ROWS == 2 && (load4(masks + (u32)(request * mask_pitch + ROWS - 1)) & 1);  // row 0 is above row 1
  const u16* values = v + (first_token * (u32)v_pitch + value_head * DIM + first_row + row_of_lane);
  u32 value_bits[ROWS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) value_bits[t] = load2(values + t * v_pitch);
  __syncwarp();  // the compiler would have some of these loads come after those that wait for the slot

  // ---- keys of the log, the first tile, its u of the log ----
  // A request of padding loads and stores nothing from here on. To return would be to wait for the slot with every load
  // above still to come: the compiler moves them below a return.
  const bool live = slot >= 0;
  if (LOG_BLOCKS) length = live ? min(length, LOG_ROWS) : 0;
  const bool flush = LOG_BLOCKS && length > 0 && length + reserve > capacity;
  constexpr int PASSES = LOG_ROWS > WARPS * ROWS_AT_ONCE ? LOG_ROWS / (WARPS * ROWS_AT_ONCE) : 1;
  u32 log_words[PASSES][WORDS] = {};
  auto log_row = [&](int pass) { return (pass * WARPS + warp) * ROWS_AT_ONCE + lane / LANES_OF_ROW; };
  if (LOG_BLOCKS) {
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int source = shuffle(listed, log_row(i) & 15);
      if (log_row(i) < length)
        load_words(log_words[i], k_records + (((record_base + source) * key_heads + key_head) * DIM + piece));
    }
  }
  state_t* tile = state + (((i64)slot * value_heads + value_head) * DIM + first_row) * DIM + piece;
  u32 words[CLASSES][QUARTER][4] = {};
  auto load_tile = [&]() {
    if (!live) return;
#pragma unroll
    for (int c = 0; c < CLASSES; c++)
#pragma unroll
      for (int i = 0; i < QUARTER; i++) load_state(words[c][i], tile + (quarter ^ c) * QUARTER * DIM + i * DIM);
  };
  load_tile();
  u32 u_words[LOG_OF_LANE][LOG_CLASSES][U_WORDS] = {};
  const log_t* u_from[LOG_OF_LANE];
  if (LOG_BLOCKS) {
#pragma unroll
    for (int m = 0; m < LOG_OF_LANE; m++) {
      const int source = shuffle(listed, lane % LOG_LANES + m * LOG_LANES);
      u_from[m] = u_records + (((record_base + source) * value_heads + value_head) * DIM + first_row);
    }
  }
  auto load_u_of_log = [&]() {
#pragma unroll
    for (int m = 0; m < LOG_OF_LANE; m++)
      if (lane % LOG_LANES + m * LOG_LANES < length) {
#pragma unroll
        for (int c = 0; c < LOG_CLASSES; c++) {
          const log_t* from = u_from[m] + (quarter ^ c) * QUARTER;
          if constexpr (QUARTER * sizeof(log_t) == 2) u_words[m][c][0] = load2(from);
          else load_words(u_words[m][c], from);
        }
      }
  };
  if (LOG_BLOCKS) load_u_of_log();

  // ---- gates and decays ----
  const float my_decay = log_decay(gate_value(a_bits, gates_bf16), __uint_as_float(A_bits), __uint_as_float(bias_bits));
  const float my_beta = sigmoid(gate_value(b_bits, gates_bf16));
  float beta[ROWS], decay[ROWS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    beta[t] = ROWS == 1 ? my_beta : shuffle(my_beta, t);
    decay[t] = ROWS == 1 ? my_decay : shuffle(my_decay, t);
  }
  int tree_record[ROWS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) tree_record[t] = LOG_BLOCKS ? shuffle(listed, length + t) : t;
  // The sum of the log's decays after row j, for lane j; and of all of them.
  float after = 0.f, total = 0.f;
  if (LOG_BLOCKS) {
    const float of_list = shuffle(stored_decay, listed);
    const float of_entry = shuffle(of_list, lane & 15), own = (lane & 15) < length ? of_entry : 0.f;
    after = __shfl_down_sync(0xffffffffu, own, 1, 16);
    if ((lane & 15) == 15) after = 0.f;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float more = __shfl_down_sync(0xffffffffu, after, step, 16);
      if ((lane & 15) + step < 16) after += more;
    }
    total = shuffle(own + after, 0);
  }

  // ---- norms of keys and queries, and dots between them ----
  float column[COLUMNS][KEYS];
#pragma unroll
  for (int t = 0; t < ROWS; t++)
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      column[2 * t][i] = element(key_words[t], i);
      column[2 * t + 1][i] = element(query_words[t], i);
    }
  auto dot = [&](int x, int y) {
    float sum = column[x][0] * column[y][0];
#pragma unroll
    for (int i = 1; i < KEYS; i++) sum = fmaf(column[x][i], column[y][i], sum);
    return sum;
  };
  float square[COLUMNS], k0_q0, k0_k1 = 0.f, k0_q1 = 0.f, k1_q1 = 0.f;
  if (ROWS == 1) {
    float sums[3][1] = {{dot(0, 0)}, {dot(1, 1)}, {dot(0, 1)}};
    add_up<LANES_OF_ROW / 2>(sums, lane);
    square[0] = sums[0][0], square[1] = sums[1][0], k0_q0 = sums[2][0];
  } else {
    constexpr int K1 = 2 * (ROWS - 1), Q1 = K1 + 1;
    float sums[1][8] = {{dot(0, 0), dot(1, 1), dot(K1, K1), dot(Q1, Q1), dot(0, 1), dot(0, K1), dot(0, Q1), dot(K1, Q1)}};
    add_up<LANES_OF_ROW / 2>(sums, lane);
    auto sum_of = [&](int i) { return shuffle(sums[0][0], i * (LANES_OF_ROW / 8)); };
    square[0] = sum_of(0), square[1] = sum_of(1), square[K1] = sum_of(2), square[Q1] = sum_of(3);
    k0_q0 = sum_of(4), k0_k1 = sum_of(5), k0_q1 = sum_of(6), k1_q1 = sum_of(7);
  }
  float scale[COLUMNS];  // 1 / |k|, DIM^-0.5 / |q|
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
    scale[c] = rsqrtf(square[c] + norm_eps) * (c & 1 ? (DIM == 128 ? 0.08838834764831845f : 0.125f) : 1.f);
  // Between rows: C without the log, L without beta.
  const float C00 = k0_q0 * scale[0] * scale[1];
  float L10 = 0.f, C10 = 0.f, C11 = 0.f;
  if (ROWS == 2) {
    constexpr int K1 = 2 * (ROWS - 1), Q1 = K1 + 1;
    const float step = above ? __expf(decay[ROWS - 1]) : 0.f;
    L10 = step * k0_k1 * scale[0] * scale[K1];
    C10 = step * k0_q1 * scale[0] * scale[Q1];
    C11 = k1_q1 * scale[K1] * scale[Q1];
  }
  // What multiplies S k and S q of each column, and, for the log, what multiplies k_j.k and k_j.q beside e^(G_h - G_j) / |k_j|.
  float from_tree[COLUMNS], from_base[COLUMNS];
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    const float path = t && above ? decay[t] + decay[0] : decay[t], of_path = __expf(path);
    const float of_all = flush ? of_path : of_path * __expf(total);
#pragma unroll
    for (int c = 2 * t; c < 2 * t + 2; c++) from_tree[c] = scale[c] * of_path, from_base[c] = scale[c] * of_all;
  }

  // ---- records of keys and gates: what they overwrite is no log row of this launch ----
  if (live && blockIdx.x == 0 && warp == 0 && lane < LANES_OF_ROW) {
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
      u16* to = k_records + (((record_base + tree_record[t]) * key_heads + key_head) * DIM + piece);
      if constexpr (WORDS == 2) *(uint2*)to = make_uint2(key_words[t][0], key_words[t][1]);
      else *(uint4*)to = make_uint4(key_words[t][0], key_words[t][1], key_words[t][WORDS - 2], key_words[t][WORDS - 1]);
    }
  }
  if (live && first_row == 0 && lane < ROWS)
    g_records[(record_base + tree_record[ROWS == 1 ? 0 : lane]) * value_heads + value_head] = my_decay;

  // ---- dots of the log's keys ----
  extern __shared__ __align__(16) u8 memory[];
  float* dots = (float*)memory;  // [COLUMNS + 1][LOG_ROWS]
  u16* log_keys = (u16*)(memory + DOTS_BYTES);
  float* fold = (float*)(memory + DOTS_BYTES + KEYS_BYTES + warp * FOLD_BYTES);  // [LOG_ROWS][TILE_ROWS]
  if (LOG_BLOCKS && length > 0) {
    float sums[COLUMNS + 1][PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
#pragma unroll
      for (int c = 0; c <= COLUMNS; c++) {
        sums[c][i] = 0.f;
#pragma unroll
        for (int e = 0; e < KEYS; e++) {
          const float x = element(log_words[i], e);
          sums[c][i] = fmaf(x, c == SELF ? x : column[c % COLUMNS][e], sums[c][i]);
        }
      }
      if (flush && log_row(i) < LOG_ROWS) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) ((u32*)(log_keys + log_row(i) * DIM + piece))[w] = log_words[i][w];
      }
    }
    add_up<LANES_OF_ROW / 2>(sums, lane);
    constexpr int WRITERS = LANES_OF_ROW / PASSES;  // lanes with the same sums
    const int j = log_row(lane % LANES_OF_ROW / WRITERS);
    if (lane % WRITERS == 0 && j < LOG_ROWS) {
#pragma unroll
      for (int c = 0; c <= COLUMNS; c++) dots[c * LOG_ROWS + j] = sums[c][0];
    }
  }
  float log_scale[LOG_OF_LANE] = {};  // e^(G_h - G_j) / |k_j|; zero where there is no row j
  auto meet = [&]() {
    __syncthreads();
#pragma unroll
    for (int m = 0; m < LOG_OF_LANE; m++) {
      const int j = lane % LOG_LANES + m * LOG_LANES;
      const float of_row = LOG_OF_LANE == 1 ? after : shuffle(after, j);
      log_scale[m] = j < length ? __expf(of_row) * rsqrtf(dots[SELF * LOG_ROWS + j] + norm_eps) : 0.f;
    }
  };

  // ---- tiles ----
  float weight[LOG_OF_LANE][COLUMNS] = {};
  u32 u_to[ROWS];
#pragma unroll
  for (int t = 0; t < ROWS; t++)
    u_to[t] = ((record_base + tree_record[t]) * value_heads + value_head) * DIM + first_row + row_of_lane;
  u32 output_to = (first_token * value_heads + value_head) * DIM + first_row + row_of_lane;
#pragma unroll 1
  for (int n = 0; n < TILES; n++) {
#if LOG_BLOCKS
    if (flush) {
      if (n == 0) meet();
      __syncwarp();
#pragma unroll
      for (int m = 0; m < LOG_OF_LANE; m++)
#pragma unroll
        for (int c = 0; c < LOG_CLASSES; c++)
#pragma unroll
          for (int i = 0; i < QUARTER; i++)
            fold[(lane % LOG_LANES + m * LOG_LANES) * TILE_ROWS + (quarter ^ c) * QUARTER + i] =
                log_scale[m] * u_element(u_words[m][c], i);
      __syncwarp();
      const float all = exp_near_one(total);
      constexpr int PART = STATE_BF16 && QUARTER > 4 ? 4 : QUARTER;  // rows at a time, in fp32
#pragma unroll
      for (int c = 0; c < CLASSES; c++)
#pragma unroll
        for (int first = 0; first < QUARTER; first += PART) {
          float s[PART][KEYS];
#pragma unroll
          for (int i = 0; i < PART; i++)
#pragma unroll
            for (int e = 0; e < KEYS; e++) s[i][e] = all * state_element(words[c][first + i], e);
          const float* of_rows = fold + (quarter ^ c) * QUARTER + first;
#pragma unroll 1
          for (int j = 0; j < length; j++) {
            float key[KEYS];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
              const u32 pair = ((const u32*)(log_keys + j * DIM + piece))[w];
              key[2 * w] = low_half(pair), key[2 * w + 1] = high_half(pair);
            }
#pragma unroll
            for (int i = 0; i < PART; i++) {
              const float x = of_rows[j * TILE_ROWS + i];
#pragma unroll
              for (int e = 0; e < KEYS; e++) s[i][e] = fmaf(x, key[e], s[i][e]);
            }
          }
#pragma unroll
          for (int i = 0; i < PART; i++) {
            u32(&w)[4] = words[c][first + i];
#pragma unroll
            for (int e = 0; e < 4; e++)
              w[e] = STATE_BF16 ? pack_bf16(s[i][2 * e % KEYS], s[i][(2 * e + 1) % KEYS]) : __float_as_uint(s[i][e]);
            store_state(tile + ((quarter ^ c) * QUARTER + first + i) * DIM, w);
          }
        }
    }
#endif
    float product[COLUMNS][CLASSES][QUARTER];
#pragma unroll
    for (int c = 0; c < CLASSES; c++)
#pragma unroll
      for (int i = 0; i < QUARTER; i++)
#pragma unroll
        for (int x = 0; x < COLUMNS; x++) {
          float sum = column[x][0] * state_element(words[c][i], 0);
#pragma unroll
          for (int e = 1; e < KEYS; e++) sum = fmaf(column[x][e], state_element(words[c][i], e), sum);
          product[x][c][i] = sum;
        }
    tile += TILE_ROWS * DIM;
    u32 next_value[ROWS];
    if (TILES > 1 && n + 1 < TILES) {
      load_tile();
      values += TILE_ROWS;
#pragma unroll
      for (int t = 0; t < ROWS; t++) next_value[t] = load2(values + t * v_pitch);
    }
    if (CLASSES == 4) {  // share with lane ^ 16
#pragma unroll
      for (int x = 0; x < COLUMNS; x++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int i = 0; i < QUARTER; i++)
            product[x][c % CLASSES][i] += exchange(product[x][(c + 2) % CLASSES][i], 16);
    }
    if (LOG_BLOCKS && length > 0) {
      if (n == 0 && !flush) {
        meet();
#pragma unroll
        for (int m = 0; m < LOG_OF_LANE; m++)
#pragma unroll
          for (int x = 0; x < COLUMNS; x++)
            weight[m][x] = log_scale[m] * from_tree[x] * dots[x * LOG_ROWS + lane % LOG_LANES + m * LOG_LANES];
      }
    }
    float sums[COLUMNS][QUARTER];
#pragma unroll
    for (int x = 0; x < COLUMNS; x++) {
#pragma unroll
      for (int i = 0; i < QUARTER; i++) {
        float of_class[LOG_CLASSES];
#pragma unroll
        for (int c = 0; c < LOG_CLASSES; c++) {
          of_class[c] = from_base[x] * product[x][c][i];
          if (LOG_BLOCKS) {
#pragma unroll
            for (int m = 0; m < LOG_OF_LANE; m++)
              of_class[c] = fmaf(weight[m][x], u_element(u_words[m][c], i), of_class[c]);
          }
        }
        sums[x][i] = of_class[0];
        if (LOG_CLASSES == 2) sums[x][i] += exchange(of_class[LOG_CLASSES - 1], 8);
      }
    }
    if (TILES > 1 && LOG_BLOCKS && n + 1 < TILES) {
#pragma unroll
      for (int m = 0; m < LOG_OF_LANE; m++) u_from[m] += TILE_ROWS;
      load_u_of_log();
    }
    add_up<4>(sums, lane);

    // ---- u and o of the lane's value row ----
    float u[ROWS], o[ROWS];
    u[0] = beta[0] * (bf16_to_float(value_bits[0]) - sums[0][0]);
    o[0] = fmaf(C00, u[0], sums[1][0]);
    if (ROWS == 2) {
      constexpr int K1 = 2 * (ROWS - 1), Q1 = K1 + 1, LAST = ROWS - 1;
      u[LAST] = beta[LAST] * (bf16_to_float(value_bits[LAST]) - fmaf(L10, u[0], sums[K1][0]));
      o[LAST] = fmaf(C11, u[LAST], fmaf(C10, u[0], sums[Q1][0]));
    }
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
      if (live && lane % COPIES == 0) {
#if LOG_BF16
        u_records[u_to[t]] = (u16)pack_bf16(u[t], 0.f);
#else
        u_records[u_to[t]] = u[t];
#endif
      }
      if (live && lane % COPIES == COPIES - 1) output[output_to + t * value_heads * DIM] = (u16)pack_bf16(o[t], 0.f);
      u_to[t] += TILE_ROWS;
      if (TILES > 1) value_bits[t] = next_value[t];
    }
    output_to += TILE_ROWS;
  }
}
