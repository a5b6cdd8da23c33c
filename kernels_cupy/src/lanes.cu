// Tree verification of one to four rows over a dense state and a log of at most 16 committed rows, in fp32 lanes.
//
// Computes what verify.cu computes (the equations are there), for plain decoding and for the shortest chains and trees.
// These have so few columns that a small batch waits for latency and tensor cores would multiply padding. Here a warp
// loads a tile of TILE_ROWS value rows straight into registers, multiplies by keys and queries there, and adds up across
// its lanes: no state passes through shared memory, and there is at most one barrier.
//
// Lanes. A lane holds 16 bytes, KEYS keys, of a value row; LANES_OF_ROW neighbours hold the row. The rows of a tile stand
// in four quarters: register [c][i] is row i of quarter (lane / 8) ^ c. A load still reads whole lines of 128 bytes, and
// what a lane keeps when it shares sums with lane ^ 16 or lane ^ 8 are the same registers for all lanes: nothing has to be
// selected.
// Sums. Lanes give each other the half that the other keeps: across 16, then 8, then (with a selection) 4, 2 and 1, until
// a lane has S k and S q of one value row for every tree row. It solves the rows one after the other and has u and o.
// Log. When quarters have been shared across 16, lane l adds what row l % 16 of the log gives the rows that it has left
// (with a bf16 state of width 64 rows l % 8 and l % 8 + 8), (weight of row j) u_j: the sum over the log is then the same
// sum over lanes. The weights are e^(G_t - G_j) k_j.k_t / |k_j|, and the same with q_t; what they have in common with S k,
// 1 / |k_t| and DIM^-0.5 / |q_t|, comes last.
// Dots. Each warp makes those of some rows of the log with all keys and queries; they pass through shared memory at the
// barrier, when the first tile has been multiplied. Those between rows of the tree go the same way, a row from each warp,
// if there are more than two rows; else every warp makes all, while it waits for its tile.
// Flush. S <- e^{G_h} S + sum_j fold_j u_j k_j^T in registers; written, and gone on with (rounded, if the state is bf16).
//
// Shared memory: `Tree` of three or four rows; with a log its dots and, for a flush, its keys and fold_j u_j of the tile of
// each warp.
// Order. Cursors first; the tile, keys and u of the log as soon as slot, length and row list are there; then keys, queries,
// gates and v, which a chained launch may read only when the launch before it has ended. Sums of the log's decays are made
// before that, gates and norms after. The next tile is asked for when the sums of the present one no longer need its
// registers.
// Occupancy: a tile takes TILE_ROWS DIM / 128 registers of a lane for each byte of a number; MIN_CTAS bounds the rest.
// With one request every warp of the launch has a place at once, so that few rows per warp are fast; 8 requests fill 16
// warps of each multiprocessor with 8 KiB of an fp32 state.
// Precision: all in fp32. A sum of log decays is a sum over rows between, of numbers of one sign, never a difference of
// two such sums: an exponent is off by its own rounding only.
// Nothing here needs an instruction newer than those of sm_80.
#include "common.cuh"

#ifndef ROWS  // tree rows: 1 to 4
#define ROWS 1
#endif
#ifndef LOG_BLOCKS  // 0, or 1 for a log of up to 16 rows
#define LOG_BLOCKS 1
#endif
#ifndef WARPS  // a power of two; at least ROWS, if there are more than two
#define WARPS 4
#endif
#ifndef TILE_ROWS  // 4, 8, 16 or 32
#define TILE_ROWS 16
#endif
#ifndef TILES  // of a warp, one after the other
#define TILES 1
#endif
#ifndef MIN_CTAS  // bounds the registers
#define MIN_CTAS 1
#endif

constexpr int THREADS = 32 * WARPS, LOG_ROWS = 16;
constexpr int KEYS = 16 / (int)sizeof(state_t), WORDS = KEYS / 2;           // of a lane; words that they are in a key or query
constexpr int LANES_OF_ROW = DIM / KEYS, ROWS_AT_ONCE = 32 / LANES_OF_ROW;  // of one load of a warp
constexpr int QUARTER = TILE_ROWS / 4;
constexpr int CLASSES = 4 / ROWS_AT_ONCE;                                   // quarters of which a lane holds a part
constexpr int LOG_CLASSES = CLASSES < 2 ? CLASSES : 2;                      // and when the log is added
constexpr int LOG_LANES = 8 * LOG_CLASSES, LOG_OF_LANE = LOG_ROWS / LOG_LANES;
constexpr int U_WORDS = QUARTER * (int)sizeof(log_t) > 4 ? QUARTER * (int)sizeof(log_t) / 4 : 1;  // of a quarter
constexpr int COPIES = 8 / QUARTER;                                         // lanes that end with the same value row
constexpr int COLUMNS = 2 * ROWS, PITCH = 8;                                // key of row 0, its query, key of row 1, ...
constexpr int SELF = COLUMNS;                                               // place of 1 / |k_j| among the dots of log row j
constexpr int FOLD_UNROLL = 2;                                              // log rows of a turn of the fold's loop
static_assert(ROWS <= 4 && (ROWS <= 2 || WARPS >= ROWS), "each of more than two rows has a warp that makes its dots");
static_assert(DIM % (TILE_ROWS * TILES) == 0 && TILE_ROWS >= 4 && TILE_ROWS <= 32, "tiles of a warp are of one head");

// What three or four rows have between them, for all value heads; fewer keep it in registers.
struct Tree {
  float dots[ROWS][PITCH];  // k_s with the key and the query of every row
  float scale[PITCH];       // 1 / |k| and DIM^-0.5 / |q| of each row, in the order of the columns
};
constexpr bool SHARED_TREE = ROWS > 2;
constexpr int TREE_BYTES = SHARED_TREE ? (int)sizeof(Tree) : 0;
constexpr int DOTS_BYTES = LOG_BLOCKS ? (COLUMNS + 1) * LOG_ROWS * 4 : 0;
constexpr int KEYS_BYTES = LOG_BLOCKS ? LOG_ROWS * DIM * 2 : 0;
constexpr int FOLD_BYTES = LOG_BLOCKS ? LOG_ROWS * TILE_ROWS * 4 : 0;    // of a warp
#ifdef EXPECTED_SHARED_BYTES
static_assert(TREE_BYTES + DOTS_BYTES + KEYS_BYTES + WARPS * FOLD_BYTES == EXPECTED_SHARED_BYTES, "LanesPlan.shared_bytes");
#endif

// Loads that the compiler does not divide, join or repeat.
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
  const int my_row = min(lane & 3, ROWS - 1);                         // tree row whose gates the lane makes
  const int warp_row = (blockIdx.x * WARPS + warp) * TILES * TILE_ROWS;  // counted from the first of the key head
  const int value_head = key_head * group + warp_row / DIM, first_row = warp_row % DIM;
  // Offsets in 32 bits: the host checks that no array but the state's has 4 GiB.
  const u32 record_base = request * record_rows, first_token = request * ROWS;

  // ---- loads that need no other ----
  const int slot = load_cursor(slots + request);
  int length = LOG_BLOCKS ? load_cursor(log_length + request) : 0;
  // The first rows of the row list are those of the log, the next those of the tree.
  const u32 entry = record_base + min(lane, record_rows - 1);
  const int listed = LOG_BLOCKS ? load_cursor(row_list + entry) : lane;
  float stored_decay = 0.f;  // of record row `lane`, in the log or not: a request has no more than 20
  // Beyond the log's length another warp may be writing what is read here; it is not used then.
  if (LOG_BLOCKS) stored_decay = __uint_as_float(load4(g_records + (entry * value_heads + value_head)));
  const u32 A_bits = load4(A_log + value_head), bias_bits = load4(dt_bias + value_head);
  const u32 my_mask = ROWS > 1 ? load4(masks + (u32)(request * mask_pitch + my_row)) : 1;

  // ---- the first tile, keys of the log, u of the log for the tile ----
  // A request of padding loads no state and stores nothing.
  const bool live = slot >= 0;
  if (LOG_BLOCKS) length = live ? min(length, LOG_ROWS) : 0;
  const bool flush = LOG_BLOCKS && length > 0 && length + reserve > capacity;
  state_t* tile = state + (((i64)slot * value_heads + value_head) * DIM + first_row) * DIM + piece;
  u32 words[CLASSES][QUARTER][4];
  auto load_tile = [&]() {
    if (!live) return;
#pragma unroll
    for (int c = 0; c < CLASSES; c++)
#pragma unroll
      for (int i = 0; i < QUARTER; i++) load_state(words[c][i], tile + (quarter ^ c) * QUARTER * DIM + i * DIM);
  };
  load_tile();
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

  // ---- what the launch before may have written: keys, queries, gates, v ----
  wait_for_launch_before();
  u32 key_words[ROWS][WORDS], query_words[ROWS][WORDS], value_bits[ROWS];
  u32 own_key_words[WORDS] = {}, own_query_words[WORDS] = {};  // of the tree row whose dots the warp makes
  const u16* values = v + (first_token * (u32)v_pitch + value_head * DIM + first_row + row_of_lane);
  const u32 gate = (first_token + my_row) * value_heads + value_head;
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    load_words(key_words[t], k + ((first_token + t) * (u32)k_pitch + key_head * DIM + piece));
    load_words(query_words[t], q + ((first_token + t) * (u32)q_pitch + key_head * DIM + piece));
  }
  const u32 a_bits = load_gate_halves(a, gate, gates_bf16), b_bits = load_gate_halves(b, gate, gates_bf16);
  if (SHARED_TREE && (WARPS == ROWS || warp < ROWS)) {
    load_words(own_key_words, k + ((first_token + warp) * (u32)k_pitch + key_head * DIM + piece));
    load_words(own_query_words, q + ((first_token + warp) * (u32)q_pitch + key_head * DIM + piece));
  }
#pragma unroll
  for (int t = 0; t < ROWS; t++) value_bits[t] = load2(values + t * v_pitch);

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
  const int my_record = LOG_BLOCKS ? shuffle(listed, length + my_row) : my_row;
  // Sums of the decays of the rows in a mask. Lane 4 t + s makes e^(G_t - G_s), zero if s is not above t.
  auto decay_of = [&](u32 rows_in) {
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < ROWS; t++) sum += rows_in >> t & 1 ? decay[t] : 0.f;
    return sum;
  };
  const float my_path = __expf(decay_of(ROWS == 1 ? 1 : my_mask)), of_base = flush ? 1.f : __expf(total);
  float path[ROWS], between[ROWS][ROWS];  // e^G from the end of the log; e^(G_t - G_s)
#pragma unroll
  for (int t = 0; t < ROWS; t++) path[t] = ROWS == 1 ? my_path : shuffle(my_path, t);
  if (ROWS > 1) {
    const u32 mask = shuffle((int)my_mask, lane >> 2 & 3), above = shuffle((int)my_mask, lane & 3);
    const float decayed = mask >> (lane & 3) & 1 ? __expf(decay_of(mask & ~above)) : 0.f;
#pragma unroll
    for (int t = 1; t < ROWS; t++)
#pragma unroll
      for (int s = 0; s < t; s++) between[t][s] = shuffle(decayed, 4 * t + s);
  }
  float column[COLUMNS][KEYS];
#pragma unroll
  for (int t = 0; t < ROWS; t++)
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      column[2 * t][i] = element(key_words[t], i);
      column[2 * t + 1][i] = element(query_words[t], i);
    }

  // ---- norms and dots of one or two rows ----
  constexpr float ROOT = DIM == 128 ? 0.08838834764831845f : 0.125f;  // DIM^-0.5
  float near[ROWS][COLUMNS] = {}, scale[COLUMNS] = {};  // `Tree` of one or two rows
  if (!SHARED_TREE) {
    auto dot = [&](int x, int y) {
      float sum = column[x][0] * column[y][0];
#pragma unroll
      for (int e = 1; e < KEYS; e++) sum = fmaf(column[x][e], column[y][e], sum);
      return sum;
    };
    if (ROWS == 1) {
      float sums[3][1] = {{dot(0, 0)}, {dot(1, 1)}, {dot(0, 1)}};
      add_up<LANES_OF_ROW / 2>(sums, lane);
      scale[0] = rsqrtf(sums[0][0] + norm_eps), scale[1] = rsqrtf(sums[1][0] + norm_eps) * ROOT, near[0][1] = sums[2][0];
    } else {
      constexpr int K1 = COLUMNS - 2, Q1 = COLUMNS - 1;  // of the second row
      float sums[1][8] = {
          {dot(0, 0), dot(1, 1), dot(K1, K1), dot(Q1, Q1), dot(0, 1), dot(0, K1), dot(0, Q1), dot(K1, Q1)}};
      add_up<LANES_OF_ROW / 2>(sums, lane);
      auto sum_of = [&](int i) { return shuffle(sums[0][0], i * (LANES_OF_ROW / 8)); };
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) scale[c] = rsqrtf(sum_of(c) + norm_eps) * (c & 1 ? ROOT : 1.f);
      near[0][1] = sum_of(4), near[0][K1] = sum_of(5), near[0][Q1] = sum_of(6), near[ROWS - 1][Q1] = sum_of(7);
    }
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
    g_records[(record_base + my_record) * value_heads + value_head] = my_decay;

  // ---- dots of more rows, and of the log's keys ----
  extern __shared__ __align__(16) u8 memory[];
  Tree& tree = *(Tree*)memory;
  float* dots = (float*)(memory + TREE_BYTES);  // [COLUMNS + 1][LOG_ROWS]
  u16* log_keys = (u16*)((u8*)dots + DOTS_BYTES);
  float* fold = (float*)((u8*)log_keys + KEYS_BYTES + warp * FOLD_BYTES);  // [LOG_ROWS][TILE_ROWS]
  if (SHARED_TREE && (WARPS == ROWS || warp < ROWS)) {
    constexpr int WRITERS = LANES_OF_ROW / PITCH;  // lanes with the same sum
    float sums[1][PITCH] = {}, square[1][1] = {};
#pragma unroll
    for (int e = 0; e < KEYS; e++) {
      const float x = element(own_key_words, e), y = element(own_query_words, e);
      square[0][0] = fmaf(y, y, square[0][0]);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) sums[0][c] = fmaf(x, column[c][e], sums[0][c]);
    }
    add_up<LANES_OF_ROW / 2>(sums, lane);
    add_up<LANES_OF_ROW / 2>(square, lane);
    const int c = lane % LANES_OF_ROW / WRITERS;
    if (lane < LANES_OF_ROW && lane % WRITERS == 0) {
      tree.dots[warp][c] = sums[0][0];
      if (c == 2 * warp) {
        tree.scale[c] = rsqrtf(sums[0][0] + norm_eps);
        tree.scale[c + 1] = rsqrtf(square[0][0] + norm_eps) * ROOT;
      }
    }
  }
  auto near_of = [&](int s, int c) { return SHARED_TREE ? tree.dots[s][c] : near[s][c]; };
  auto scale_of = [&](int c) { return SHARED_TREE ? tree.scale[c] : scale[c]; };
  if (LOG_BLOCKS && (SHARED_TREE || length > 0)) {
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
      const float of_key = rsqrtf(sums[SELF][0] + norm_eps);
#pragma unroll
      for (int c = 0; c <= COLUMNS; c++) dots[c * LOG_ROWS + j] = j < length ? of_key * (c == SELF ? 1.f : sums[c][0]) : 0.f;
    }
  }
  float log_decays[LOG_OF_LANE] = {};  // e^(G_h - G_j)
  if (LOG_BLOCKS) {
#pragma unroll
    for (int m = 0; m < LOG_OF_LANE; m++)
      log_decays[m] = __expf(LOG_OF_LANE == 1 ? after : shuffle(after, lane % LOG_LANES + m * LOG_LANES));
  }
  const float* my_dots = dots + lane % LOG_LANES;

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
      if (n == 0) __syncthreads();  // dots are there
      __syncwarp();
#pragma unroll
      for (int m = 0; m < LOG_OF_LANE; m++)
#pragma unroll
        for (int c = 0; c < LOG_CLASSES; c++)
#pragma unroll
          for (int i = 0; i < QUARTER; i++)
            fold[(lane % LOG_LANES + m * LOG_LANES) * TILE_ROWS + (quarter ^ c) * QUARTER + i] =
                log_decays[m] * my_dots[SELF * LOG_ROWS + m * LOG_LANES] * u_element(u_words[m][c], i);
      __syncwarp();
      const float all = exp_near_one(total);
      constexpr int LANE_ROWS = CLASSES * QUARTER, MOST = STATE_BF16 ? 4 : 16;
      constexpr int PART = LANE_ROWS < MOST ? LANE_ROWS : MOST;  // rows at a time
#pragma unroll
      for (int first = 0; first < LANE_ROWS; first += PART) {
        float s[PART][KEYS];
#pragma unroll
        for (int i = 0; i < PART; i++)
#pragma unroll
          for (int e = 0; e < KEYS; e++)
            s[i][e] = all * state_element(words[(first + i) / QUARTER][(first + i) % QUARTER], e);
#pragma unroll FOLD_UNROLL
        for (int j = 0; j < length; j++) {
          float key[KEYS];
#pragma unroll
          for (int w = 0; w < WORDS; w++) {
            const u32 pair = ((const u32*)(log_keys + j * DIM + piece))[w];
            key[2 * w] = low_half(pair), key[2 * w + 1] = high_half(pair);
          }
#pragma unroll
          for (int i = 0; i < PART; i++) {
            const float x = fold[j * TILE_ROWS + (quarter ^ (first + i) / QUARTER) * QUARTER + (first + i) % QUARTER];
#pragma unroll
            for (int e = 0; e < KEYS; e++) s[i][e] = fmaf(x, key[e], s[i][e]);
          }
        }
#pragma unroll
        for (int i = 0; i < PART; i++) {
          const int c = (first + i) / QUARTER, row = (first + i) % QUARTER;
          u32(&w)[4] = words[c][row];
#pragma unroll
          for (int e = 0; e < 4; e++)
            w[e] = STATE_BF16 ? pack_bf16(s[i][2 * e % KEYS], s[i][(2 * e + 1) % KEYS]) : __float_as_uint(s[i][e]);
          store_state(tile + ((quarter ^ c) * QUARTER + row) * DIM, w);
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
    if (CLASSES == 4) {  // share with lane ^ 16
#pragma unroll
      for (int x = 0; x < COLUMNS; x++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int i = 0; i < QUARTER; i++)
            product[x][c % CLASSES][i] += exchange(product[x][(c + 2) % CLASSES][i], 16);
    }
    if (n == 0 && !flush && (SHARED_TREE || length > 0)) {
      __syncthreads();
      if (LOG_BLOCKS && length > 0) {
#pragma unroll
        for (int m = 0; m < LOG_OF_LANE; m++)
#pragma unroll
          for (int x = 0; x < COLUMNS; x++)
            weight[m][x] = log_decays[m] * path[x / 2] * my_dots[x * LOG_ROWS + m * LOG_LANES];
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
          of_class[c] = path[x / 2] * of_base * product[x][c][i];
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
    tile += TILE_ROWS * DIM;
    u32 next_value[ROWS];
    if (TILES > 1 && n + 1 < TILES) {
      load_tile();
      values += TILE_ROWS;
#pragma unroll
      for (int t = 0; t < ROWS; t++) next_value[t] = load2(values + t * v_pitch);
    }
    if (TILES > 1 && LOG_BLOCKS && n + 1 < TILES) {
#pragma unroll
      for (int m = 0; m < LOG_OF_LANE; m++) u_from[m] += TILE_ROWS;
      load_u_of_log();
    }
    add_up<4>(sums, lane);

    // ---- u and o of the lane's value row ----
    float u[ROWS], o[ROWS];
    float scaled[ROWS];  // u / |k|
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
      float of_key = sums[2 * t][0], of_query = sums[2 * t + 1][0];
#pragma unroll
      for (int s = 0; s < t; s++) {
        const float decayed = between[t][s] * scaled[s];
        of_key = fmaf(near_of(s, 2 * t), decayed, of_key);
        of_query = fmaf(near_of(s, 2 * t + 1), decayed, of_query);
      }
      u[t] = beta[t] * (bf16_to_float(value_bits[t]) - scale_of(2 * t) * of_key);
      scaled[t] = scale_of(2 * t) * u[t];
      o[t] = scale_of(2 * t + 1) * fmaf(near_of(t, 2 * t + 1), scaled[t], of_query);
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
