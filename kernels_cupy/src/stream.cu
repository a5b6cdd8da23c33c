// Tree verification of at most 16 rows over a dense state and a log of at most 16 committed rows, or of as many as make 32
// with those of the tree: warps that stream.
//
// Computes what verify.cu computes (the equations are there), for the trees that most requests have. The warps of a CTA
// place keys and queries in shared memory together; each then streams tiles of 16 value rows x DIM keys of one head's S
// through two matrix products. The warps of a value head share its small matrices and otherwise wait for no one.
//
// Columns. Tree rows stand in groups of four; group i fills one column block of 8 of the tensor core's products: column
// 2 t is the key of row 4 i + t, column 2 t + 1 its query. So lane 4 g + t holds S k, S q, and later u and o, of row
// 4 i + t for two value rows (2 g and 2 g + 1 of the tile), and never exchanges anything with other lanes.
//
// Small matrices. With L, C as in verify.cu, T = (I + L)^-1 and R = beta v - beta e^G S k - L_log u_log:
//     [u; o] = [R; e^G S q + C_log u_log] + [T - I; C T] R
// T is exact to float (a lane per column substitutes, L by columns), its entries are at most 1 in size since the delta rule
// contracts.
// The Gram matrix comes out of the tensor core in the place where the product with it wants its operand: entry [column
// g, row t] in lane 4 g + t. Hence [L_log; C_log] and [T - I; C T] are kept lane by lane, as bf16 hi and lo (and least)
// parts: in registers for up to 4 rows, in shared memory beyond.
// R of rows 8 p + t and 8 p + 4 + t is one 32-bit word of two bf16 in each of three parts: products of 8 k-slots need no
// register to move. Where records are bf16, two parts of R and T do, and u of the log is exact in one: 5 products, not 11.
//
// Shared memory: per warp STAGES tiles and at least two places for what a tile takes of v and of the log's u; then keys and
// queries of the rows, keys of the log, `Scales`, `Head` of each value head, weights of a fold for each warp. Tiles come
// first, for they must start at multiples of 128 bytes: asynchronous copies into lines that are cut in two made a step
// with an fp32 state 13 % longer.
// Order. Cursors first; as soon as the slot is known the first tiles; then what needs the log's row list, and v. A CTA that
// starts beside the launch before it (`early`) has asked for all of the state and the log by the time it may read keys,
// queries, gates and v, and if its request folds it has folded its first tiles where registers allow (`FOLDS_EARLY`); all
// others ask for keys, queries and gates together with the cursors. A bf16 tile goes to registers as a whole, so that the
// next is asked for before it is multiplied.
// The first tile is multiplied before the small matrices are made: they are made in the shadow of the second tile's copy.
// Asynchronous copies bring a tile, its v and its u of the log, STAGES tiles ahead; what a tile needs comes the way the
// tile comes, since loads into registers are waited for at the end of the loop.
// End of a launch. What a multiprocessor still does when others have nothing left is half a CTA on average, and a CTA that
// folds a log lives longer. With HALVED the last requests have twice the CTAs, each with half the tiles of every warp.
// Occupancy: MIN_CTAS bounds the registers. 12, 16, 20 or 24 warps of a multiprocessor have 168, 128, 96 or 80 registers
// (with 24 some variants spill, see resources.csv), and with 16 of them 128 KiB of fp32 tiles are in flight; every one is at
// another point of its life. 16 rows with an fp32 state fit three CTAs of four warps.
// Precision and traffic: as verify.cu. Nothing here needs an instruction newer than those of sm_80.
#include "common.cuh"

#ifndef GROUPS  // groups of four tree rows: 1, 2 or 4
#define GROUPS 1
#endif
#ifndef LOG_BLOCKS  // blocks of 16 log rows: 0, 1 or 2
#define LOG_BLOCKS 1
#endif
#ifndef HALVED  // whether the last requests are cut finer
#define HALVED 0
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif
#ifndef STAGES
#define STAGES 1
#endif
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 4 * GROUPS, PAIRS = (GROUPS + 1) / 2, LOG_ROWS = LOG_BLOCKS == 2 ? 32 : 16;
constexpr int TILES_PER_HEAD = DIM / 16;
// A tile in shared memory, whose lines of 128 bytes an asynchronous copy of a warp fills four at a time. fp32: 16-byte pieces
// in the order of the lanes that copy and read them. bf16: rows, first the even ones, then the odd ones, as load_matrix4
// wants them; pieces change places with the row's number, against bank conflicts.
constexpr int ROW_BYTES = DIM * (int)sizeof(state_t);
constexpr int STAGE_BYTES = 16 * ROW_BYTES;
// What a tile takes of v and of the log's u, 16 value rows wide, is read later than the tile. With one stage it has two
// places, so that the next can be asked for with the tile.
constexpr int U_PITCH = 16 * (int)sizeof(log_t);
constexpr int U_OFFSET = 32 * ROWS, SIDE_BYTES = U_OFFSET + (LOG_BLOCKS ? LOG_ROWS * U_PITCH : 0);
constexpr int SIDES = STAGES > 1 ? STAGES : 2;
constexpr int WARP_BYTES = STAGES * STAGE_BYTES + SIDES * SIDE_BYTES;
static_assert(WARP_BYTES % 128 == 0, "asynchronous copies want whole lines");
constexpr bool KEEP = GROUPS == 1 && WARPS * MIN_CTAS <= 20;  // small matrices stay in registers
constexpr bool FOLDS_EARLY = WARPS * MIN_CTAS <= 20;          // registers for a second place where tiles are folded
constexpr bool CHAINS = GROUPS < 4;  // room for a second chain of products
constexpr int SHARERS = 32 / ROWS;                            // lanes that share a column of T
constexpr int SHARE = ROWS > SHARERS ? ROWS / SHARERS : 1;    // rows of C T that each of them makes
constexpr int BLOCKS_OF_TREE = GROUPS == 4 ? 6 : GROUPS;      // blocks of 4 columns x 8 rows on and below the diagonal
DEVICE constexpr int tree_block(int i, int p) { return i < 2 ? i : 2 * i - 2 + p; }

struct Scales {
  float tree[2 * ROWS];  // 1 / |k| and DIM^-0.5 / |q| of each row, in the order of the columns
  float log[LOG_ROWS];   // 1 / |k|
};
constexpr int KEY_BYTES = (2 * ROWS + (LOG_BLOCKS ? LOG_ROWS : 0)) * DIM * 2;

// What the tiles of one value head need. The B operands are stored lane by lane.
struct Head {
  float4 factor[ROWS];               // beta, -beta e^G / |k|, e^G DIM^-0.5 / |q|; where u goes, in bytes from the records
  uint4 tree[BLOCKS_OF_TREE][32];    // [T - I; C T]: hi, lo, least
#if LOG_BLOCKS
  uint4 log[LOG_BLOCKS][GROUPS][32];  // [L_log; C_log]: hi of a block's rows 2 t and 2 t + 1, of 2 t + 8 and 2 t + 9, lo
#endif
  float L[ROWS][ROWS], C[ROWS][ROWS];  // then T - I and C T
};

#ifdef EXPECTED_SMALL_BYTES
static_assert(KEY_BYTES + sizeof(Scales) + sizeof(Head) + (LOG_BLOCKS ? 4 * WARPS * (LOG_ROWS + 4) : 0) == EXPECTED_SMALL_BYTES,
              "StreamPlan.shared_bytes");
#endif

constexpr int PIECES = DIM * (int)sizeof(state_t) / 32;  // of a lane
// Where the lane's i-th piece of a tile is, in elements, and where it goes. fp32: 64 bytes of every second row; bf16: whole
// rows.
DEVICE int place_in_tile(int i, int lane) {
#if STATE_BF16
  return 256 * i + 8 * lane;
#else
  return ((lane >> 2) * 2 + (i & 1)) * DIM + (i >> 1) * 16 + (lane & 3) * 4;
#endif
}
DEVICE int place_in_stage(int i, int lane) {
#if STATE_BF16
  const int piece = lane % (DIM / 8), row = 256 / DIM * i + lane / (DIM / 8);
  return ((row & 1) * 8 + (row >> 1)) * ROW_BYTES + ((piece ^ (row >> 1)) << 4);
#else
  return 512 * i + 16 * lane;
#endif
}

// Where 16-byte piece p of row r of u is: pieces of an fp32 row change places against bank conflicts.
DEVICE int u_place(int r, int p) { return r * U_PITCH + ((LOG_BF16 ? p : p ^ (r >> 1 & 3)) << 4); }

DEVICE void copy_tile(u32 stage, const state_t* tile, int lane) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) copy_async16(stage + place_in_stage(i, lane), tile + place_in_tile(i, lane));
}

// Eight columns of a key row, to shared memory: in their own order for a bf16 state.
DEVICE void place_row(u16* keys, int row, int column, uint4 words) {
#if STATE_BF16
  *(uint4*)(keys + row * DIM + (column ^ ((row & 7) << 3))) = words;
#else
  store_keys(keys, row, column, words);
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

// Inputs of one value head that belong to a lane's row; lanes 0-15 stand for the rows of the log, 16-31 for the tree's. With
// two blocks of log rows all lanes stand for the log's as well, in what is named after it.
struct Gates {
  u32 a, b;
  float A_log, dt_bias, log_decay;
};

// A barrier of some warps. Its name is a constant, since a name in a register would take all sixteen for the CTA.
template <int NAME>
DEVICE void barrier(int threads) { asm volatile("bar.sync %0, %1;" ::"n"(NAME), "r"(threads) : "memory"); }

// grid: (CTAs of a key head, key heads, requests); the last `halved` requests have two CTAs in place of each
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify_stream(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_pitch, int k_pitch,
              int v_pitch, const void* __restrict__ a, const void* __restrict__ b, int gates_bf16,
              const float* __restrict__ A_log, const float* __restrict__ dt_bias, const u64* __restrict__ masks,
              int mask_pitch, state_t* state, const int* __restrict__ slots, log_t* u_records, u16* k_records,
              float* g_records, int record_rows, const int* __restrict__ log_length, const int* __restrict__ row_list,
              u16* __restrict__ output, int rows, int key_heads, int value_heads, int group, int tiles_per_warp,
              int halved, int capacity, int reserve, float norm_eps, int early_ctas) {
  const int key_head = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
#if HALVED
  int request = blockIdx.z, share = blockIdx.x;
  const int whole = (int)gridDim.z - 2 * min(halved, (int)gridDim.z / 2);  // requests that are not halved
  if (request >= whole) {
    const int half = request - whole;
    request = whole + (half >> 1), share = 2 * share + (half & 1), tiles_per_warp >>= 1;
  }
#else
  const int request = blockIdx.z, share = blockIdx.x;
#endif
  const int g = lane >> 2, t = lane & 3;
  const int row = lane - 16;  // lanes 0-15 stand for the (first) rows of the log, lanes 16-31 for those of the tree
  const bool is_tree = row >= 0 && row < rows, is_query = g & 1;
  const i64 record_base = (i64)request * record_rows;
  const int first_token = request * rows;
  // Tiles of the CTA and of this warp, counted from the first of the key head. A warp's tiles are of one value head.
  const int cta_tile = share * WARPS * tiles_per_warp, my_tile = cta_tile + warp * tiles_per_warp;
  const int head_of_key = my_tile / TILES_PER_HEAD, value_head = key_head * group + head_of_key;
  // The first warp of a head makes the small matrices of its tree, the second those of its log, if there is one. Key heads
  // take turns in which is the first, so that the four schedulers of a multiprocessor have the same work.
  const int heads = max(WARPS * tiles_per_warp / TILES_PER_HEAD, 1);
  const int turn = (warp ^ (WARPS % 2 ? 0 : key_head & 1)) * tiles_per_warp % TILES_PER_HEAD;
  const bool of_tree = turn == 0, of_log = LOG_BLOCKS && turn == tiles_per_warp % TILES_PER_HEAD;

  // ---- loads that need no other ----
  const int slot = load_cursor(slots + request);
  int length = 0, listed = lane;  // the first rows of the row list are those of the log, the next those of the tree
  if (LOG_BLOCKS) {
    length = min(load_cursor(log_length + request), LOG_ROWS);
    if (lane < record_rows) listed = load_cursor(row_list + record_base + lane);
  }
  u32 mask = 0;
  Gates gates{};
  if (is_tree && (of_tree || of_log)) {
    mask = (u32)masks[(i64)request * mask_pitch + row];
    gates.A_log = A_log[value_head], gates.dt_bias = dt_bias[value_head];
  }
  constexpr int LANES = DIM / 8, ROWS_AT_ONCE = THREADS / LANES;
  constexpr int PASSES = (2 * ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  constexpr int LOG_PASSES = (LOG_ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const int piece = tid % LANES;
  uint4 words[PASSES], log_words[LOG_PASSES];
  // What the launch before may have written: gates, keys and queries; a thread has one kind of them.
  static_assert(ROWS_AT_ONCE % 2 == 0, "a thread's columns are all keys or all queries");
  const bool takes_query = tid / LANES & 1;
  const int my_pitch = 2 * (takes_query ? q_pitch : k_pitch), first_mine = tid / LANES / 2;
  const u32 mine_from = (first_token + first_mine) * (u32)my_pitch + (key_head * DIM + piece * 8) * 2;
  const u32 gates_from = (first_token + row) * value_heads + value_head;
  auto load_rows = [&] {
    wait_for_launch_before();
    const u8* mine = (const u8*)(takes_query ? q : k);
    written_before(mine), written_before(v), written_before(a), written_before(b);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int r = first_mine + i * (ROWS_AT_ONCE / 2);
      words[i] = make_uint4(0, 0, 0, 0);
      if (r < rows) words[i] = *(const uint4*)(mine + (mine_from + i * (ROWS_AT_ONCE / 2) * my_pitch));
    }
    if (is_tree && (of_tree || of_log))
      gates.a = load_gate(a, gates_from, gates_bf16), gates.b = load_gate(b, gates_from, gates_bf16);
  };
  // CTAs that start beside the launch before ask for the state first; the others, in the second wave of this launch, have
  // nothing to wait for.
  const bool early = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) < early_ctas;
  if (!early) load_rows();
  if (slot < 0) {
    if (early) wait_for_launch_before();
    return;
  }

  // ---- the first tiles ----
  extern __shared__ __align__(128) u8 memory[];
  u8* stages = memory + warp * WARP_BYTES;
  u8* sides = stages + STAGES * STAGE_BYTES;
  u16* keys = (u16*)(memory + WARPS * WARP_BYTES);
  u16* log_keys = keys + 2 * ROWS * DIM;
  Scales& scales = *(Scales*)((u8*)keys + KEY_BYTES);
  Head* table = (Head*)(&scales + 1);
  Head& head = table[head_of_key - cta_tile / TILES_PER_HEAD];
  float* fold = (float*)(table + heads) + warp * (LOG_ROWS + 4);  // e^{G_h - G_j} / |k_j|, then e^{G_h}
  const u32 first_stage = shared_address(stages), first_side = shared_address(sides);
  // The warp's next tile.
  state_t* tile =
      state + (((i64)slot * value_heads + key_head * group) * TILES_PER_HEAD + my_tile) * 16 * DIM;
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (i < tiles_per_warp) copy_tile(first_stage + i * STAGE_BYTES, tile + i * 16 * DIM, lane);

  // ---- keys and gates of the log, u of the first tiles ----
  const bool flush = LOG_BLOCKS && length > 0 && length + reserve > capacity;
  const bool sees_log = LOG_BLOCKS && length > 0 && !flush;
  const int tree_record = shuffle(listed, length + row & 31);  // of a tree row's lane
  if (LOG_BLOCKS) {
#pragma unroll
    for (int i = 0; i < LOG_PASSES; i++) {
      const int r = tid / LANES + i * ROWS_AT_ONCE;
      const int source = shuffle(listed, r & LOG_ROWS - 1);
      log_words[i] = make_uint4(0, 0, 0, 0);
      if (r < length)
        log_words[i] = *(const uint4*)(k_records + ((record_base + source) * key_heads + key_head) * DIM + piece * 8);
    }
    if (lane < length && (of_tree || of_log || flush))
      gates.log_decay = g_records[(record_base + listed) * value_heads + value_head];
  }
  // Where the next copy of v and u comes from: bytes from the start of an array; the host checks that 32 bits hold them.
  // Rows that are not there stand for the last (the first of the log): their factors are zero.
  const u32 record_bytes = value_heads * DIM * (u32)sizeof(log_t);  // u of one row
  const u32 first_value = value_head * DIM + my_tile % TILES_PER_HEAD * 16;
  constexpr int U_PIECES = (int)sizeof(log_t), U_COPIES = LOG_ROWS * U_PIECES / 32;  // 16-byte pieces; copies of a lane
  u32 v_from = ((u32)(first_token + min(lane >> 1, rows - 1)) * v_pitch + first_value) * 2 + (lane & 1) * 16;
  u32 u_from[U_COPIES] = {};
#pragma unroll
  for (int i = 0; i < U_COPIES; i++) {
    const int r = (lane + 32 * i) / U_PIECES;
    u_from[i] = first_value * (u32)sizeof(log_t) + lane % U_PIECES * 16 +
                ((u32)record_base + shuffle(listed, r < length ? r : 0)) * record_bytes;
  }
  const bool second_block = length > 16;  // of the log
  auto copy_u = [&](u32 side) {  // and go to the next tile
    if (LOG_BLOCKS && length > 0) {
#pragma unroll
      for (int i = 0; i < U_COPIES; i++) {
        const int r = (lane + 32 * i) / U_PIECES;
        if (LOG_BLOCKS == 2 && i >= U_COPIES / 2 && !second_block) continue;
        copy_async16(side + U_OFFSET + u_place(r, lane % U_PIECES), (const u8*)u_records + u_from[i]);
        u_from[i] += 16 * (u32)sizeof(log_t);
      }
    }
  };
  auto copy_v = [&](u32 side) {  // the same
    if (lane < 2 * ROWS) copy_async16(side + lane * 16, (const u8*)v + v_from);
    v_from += 32;
  };
  auto copy_rows = [&](u32 side) { copy_v(side), copy_u(side); };
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (i < tiles_per_warp) copy_u(first_side + i * SIDE_BYTES);

  // ---- what only the log decides: its keys and their norms, sums of its decays, what a fold takes of its rows ----
  // Sums of decays. With one block of log rows, lanes 0-15 have theirs in G; with two, all lanes in log_G.
  double G = 0.0, log_G = 0.0;
  double& of_log_row = LOG_BLOCKS == 2 ? log_G : G;
  if (LOG_BLOCKS && lane < length) of_log_row = gates.log_decay;
  auto sum_log = [&] {
#pragma unroll
    for (int step = 1; step < LOG_ROWS; step *= 2) {
      const double more = __shfl_up_sync(0xffffffffu, of_log_row, step);
      if (lane >= step) of_log_row += more;
    }
  };
  auto place_log = [&] {
    if (!LOG_BLOCKS) return;
    float sums[LOG_PASSES];
    sums_of_squares<LANES>(log_words, sums);
#pragma unroll
    for (int i = 0; i < LOG_PASSES; i++) {
      const int r = tid / LANES + i * ROWS_AT_ONCE;
      if (LOG_ROWS % ROWS_AT_ONCE == 0 || r < LOG_ROWS) {
        place_row(log_keys, r, piece * 8, log_words[i]);
        if (piece == 0) scales.log[r] = rsqrtf(sums[i] + norm_eps);
      }
    }
  };
  auto weigh_fold = [&] {  // when the norms are there
    const double last = shuffle(of_log_row, length - 1);
    if (lane < LOG_ROWS) fold[lane] = lane < length ? __expf((float)(last - of_log_row)) * scales.log[lane] : 0.f;
    if (lane == 0) fold[LOG_ROWS] = exp_near_one((float)last);
    __syncwarp();
  };
#if STATE_BF16
  const u32 matrix = ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (((lane >> 4) ^ (lane & 7)) << 4);
#endif
  // u of log row 2 t, 2 t + 1, 2 t + 8 or 2 t + 9, then of the next block.
  auto logged = [&](const u8* side, int i) {
    const int r = 2 * t + (i & 1) + 8 * (i >> 1), byte = 2 * g * (int)sizeof(log_t);
    return (const log_t*)(side + U_OFFSET + u_place(r, byte >> 4) + (byte & 15));
  };
  // Fold the log into the tile in a stage, S <- e^{G_h} S + sum_j fold_j u_j k_j^T, and write it. A bf16 tile is folded in
  // its place; `then` gets the keys of a k-step of an fp32 one, of value rows 2 g and 2 g + 1.
  auto fold_tile = [&](int stage, const u8* side, auto then) {
#if LOG_BLOCKS
    u32 part[LOG_BLOCKS][3][4];  // weighted u of the log
#pragma unroll
    for (int i = 0; i < 2 * LOG_BLOCKS; i++) {
      u32(&to)[3][4] = part[i / 2];
      const int c = 2 * (i & 1);
      float2 w = *(const float2*)&fold[2 * t + 8 * i], x = load_u(logged(side, 2 * i)), y = load_u(logged(side, 2 * i + 1));
      if (i >= 2 && !second_block) x = y = make_float2(0.f, 0.f);  // no one copied them
      split(w.x * x.x, w.y * y.x, to[0][c], to[1][c], to[2][c]);
      split(w.x * x.y, w.y * y.y, to[0][c + 1], to[1][c + 1], to[2][c + 1]);
    }
    const u32 fold_address = shared_address(log_keys), fold_offset = a_key_offset(lane);
    const float all = fold[LOG_ROWS];
#if STATE_BF16
#pragma unroll 2
    for (int pair = 0; pair < K_STEPS; pair += 2) {
      u32 S[2][4], y[2][LOG_BLOCKS][4];  // of the tile; keys of the log
      float left[2][4] = {}, right[2][4] = {};
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int j = pair + odd;
#pragma unroll
        for (int block = 0; block < LOG_BLOCKS; block++)
          load_matrix4_transposed(y[odd][block], fold_address + block * 32 * DIM + (fold_offset ^ (32 * j)));
        load_matrix4(S[odd], first_stage + stage + (matrix ^ (32 * j)));
      }
      __syncwarp();  // every lane has read what is overwritten now
#pragma unroll
      for (int block = 0; block < LOG_BLOCKS; block++)
#pragma unroll
        for (int p = PARTS - 1; p >= 0; p--)
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            mma(left[odd], part[block][p], y[odd][block][0], y[odd][block][1]);
            mma(right[odd], part[block][p], y[odd][block][2], y[odd][block][3]);
          }
#pragma unroll
      for (int odd = 0; odd < 2; odd++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 two = S[odd][i];  // keys of value row 2 g (i even) or 2 g + 1
          const float* more = (i < 2 ? left : right)[odd] + 2 * (i & 1);
          *(u32*)(stages + stage + ((i & 1) * 8 + g) * ROW_BYTES + ((2 * (pair + odd) + (i >> 1) ^ g) << 4) + 4 * t) =
              pack_bf16(fmaf(all, low_half(two), more[0]), fmaf(all, high_half(two), more[1]));
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      *(uint4*)(tile + place_in_tile(i, lane)) = *(const uint4*)(stages + stage + place_in_stage(i, lane));
#else
    const float4* pieces = (const float4*)(stages + stage) + lane;
#pragma unroll 1
    for (int pair = 0; pair < K_STEPS; pair += 2)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int j = pair + odd;
        u32 x[4];
        float left[4] = {}, right[4] = {};
        float4 y = pieces[64 * j], z = pieces[64 * j + 32];
#pragma unroll
        for (int block = 0; block < LOG_BLOCKS; block++) {
          load_matrix4_transposed(x, fold_address + block * 32 * DIM + (fold_offset ^ (32 * j)));
#pragma unroll
          for (int p = PARTS - 1; p >= 0; p--) {
            mma(left, part[block][p], x[0], x[1]);
            mma(right, part[block][p], x[2], x[3]);
          }
        }
        y = make_float4(fmaf(all, y.x, left[0]), fmaf(all, y.y, left[1]), fmaf(all, y.z, right[0]), fmaf(all, y.w, right[1]));
        z = make_float4(fmaf(all, z.x, left[2]), fmaf(all, z.y, left[3]), fmaf(all, z.z, right[2]), fmaf(all, z.w, right[3]));
        *(float4*)(tile + 2 * g * DIM + 16 * j + 4 * t) = y;
        *(float4*)(tile + (2 * g + 1) * DIM + 16 * j + 4 * t) = z;
        then(pair, odd, y, z);
      }
#endif
#endif
  };

  // A CTA that waits for the launch before folds its first tiles meanwhile.
  const bool folded = FOLDS_EARLY && early && flush;
  if (early) {
    place_log();
    if (of_tree || of_log || flush) sum_log();
    if (folded) {
      __syncthreads();  // norms
      weigh_fold();
      copy_wait_all();
      __syncwarp();
      fold_tile(0, sides, [&](int pair, int odd, float4 y, float4 z) {
        float4* pieces = (float4*)stages + 64 * (pair + odd) + lane;
        pieces[0] = y, pieces[32] = z;
      });
    }
    load_rows();
  }
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
    if (i < tiles_per_warp) copy_v(first_side + i * SIDE_BYTES);
    copy_commit();
  }

  // ---- log decays along the paths: every lane jumps to the ancestor of its ancestor ----
  const float beta = is_tree ? sigmoid(gate_value(gates.b, gates_bf16)) : 0.f;
  const float own_decay = is_tree ? log_decay(gate_value(gates.a, gates_bf16), gates.A_log, gates.dt_bias) : 0.f;
  if (LOG_BLOCKS == 2 || row >= 0) G = own_decay;
  if (of_tree || of_log || flush) {
    const u32 above = is_tree ? mask & ~(1u << row) : 0;
    const int of_root = LOG_BLOCKS == 2 || flush ? -1 : length - 1;  // who is above the root
    const int of_other = LOG_BLOCKS == 1 && !early && lane < length ? lane - 1 : -1;
    int up = is_tree ? (above ? 16 + 31 - __clz(above) : of_root) : of_other;
    while (__any_sync(0xffffffffu, up >= 0)) {
      const int from = max(up, 0);
      const double more = shuffle(G, from);
      const int next = shuffle(up, from);
      if (up >= 0) G += more, up = next;
    }
    if (LOG_BLOCKS == 2) {
      if (!early) sum_log();
      if (!flush) G += shuffle(log_G, 31);
    }
  }

  // ---- keys and queries to shared memory, norms; records of the keys ----
  {
    float sums[PASSES];
    int record_of[PASSES];
    sums_of_squares<LANES>(words, sums);
#pragma unroll
    for (int i = 0; i < PASSES; i++) record_of[i] = shuffle(tree_record, 16 + first_mine + i * (ROWS_AT_ONCE / 2));
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int column = tid / LANES + i * ROWS_AT_ONCE, r = column >> 1;
      if (2 * ROWS % ROWS_AT_ONCE == 0 || column < 2 * ROWS) {
        place_row(keys, column, piece * 8, words[i]);
        if (share == 0 && !takes_query && r < rows)  // what it overwrites is no log row of this launch
          *(uint4*)(k_records + ((record_base + record_of[i]) * key_heads + key_head) * DIM + piece * 8) = words[i];
        if (piece == 0)
          scales.tree[column] = (takes_query ? (DIM == 128 ? 0.08838834764831845f : 0.125f) : 1.f) * rsqrtf(sums[i] + norm_eps);
      }
    }
  }
  if (!early) place_log();
  __syncthreads();
  if (flush && !folded) weigh_fold();

  // ---- tiles ----
  const u32 key_address = shared_address(keys);
  const u32 b_offset = GROUPS == 1 ? (lane & 7) * 2 * DIM + (((lane >> 3) ^ (lane & 7)) << 4) : b_key_offset(lane);
  u32 u_offset = (first_value + 2 * g) * (u32)sizeof(log_t);
  u32 out_offset = ((u32)(first_token + t) * value_heads * DIM + first_value + 2 * g) * 2;
  uint4 log_kept[LOG_BLOCKS ? LOG_BLOCKS : 1], tree_kept[KEEP ? BLOCKS_OF_TREE : 1];
  float4 factor_kept[KEEP ? GROUPS : 1];
  int stage = 0, side_place = 0;  // in bytes from the first
#pragma unroll 1
  for (int n = 0; n < tiles_per_warp; n++) {
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
    copy_wait<STAGES - 1>();
    __syncwarp();  // what other lanes copied is there too
    const u8* side = sides + side_place;
    const bool folds = flush && !(folded && n == 0);
    auto copy_next = [&] {  // when every lane has read the stage
      __syncwarp();
      if (n + STAGES < tiles_per_warp) {
        copy_tile(first_stage + stage, tile + STAGES * 16 * DIM, lane);
        if (STAGES == 1) copy_rows(first_side + (SIDE_BYTES - side_place));
      }
      if (STAGES == 1) copy_commit();
    };
#if STATE_BF16
    if (folds) fold_tile(stage, side, [](int, int, float4, float4) {});
    u32 S[K_STEPS][4];  // the whole tile, so that the next can be asked for before it is multiplied
#pragma unroll
    for (int j = 0; j < K_STEPS; j++) load_matrix4(S[j], first_stage + stage + (matrix ^ (32 * j)));
    copy_next();
#pragma unroll
    for (int j = 0; j < K_STEPS; j++) multiply(S[j], S[j], j, j % 2);
#else
    auto multiply_parts = [&](int j, int odd, float4 y, float4 z) {
      u32 hi[4], lo[4];
      split2(y.x, y.y, hi[0], lo[0]);
      split2(z.x, z.y, hi[1], lo[1]);
      split2(y.z, y.w, hi[2], lo[2]);
      split2(z.z, z.w, hi[3], lo[3]);
      multiply(hi, lo, j, odd);
    };
    if (folds) {
      fold_tile(stage, side, [&](int pair, int odd, float4 y, float4 z) { multiply_parts(pair + odd, odd, y, z); });
    } else {
      const float4* pieces = (const float4*)(stages + stage) + lane;
#pragma unroll
      for (int j = 0; j < K_STEPS; j++) multiply_parts(j, j % 2, pieces[64 * j], pieces[64 * j + 32]);
    }
    copy_next();
#endif
    tile += 16 * DIM;
    if (STAGES > 1) stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    if (n == 0) {
      if (of_tree || of_log) {
        const u32 a_offset = GROUPS == 1 ? (lane & 7) * 2 * DIM + (((lane >> 4) ^ (lane & 7)) << 4) : a_key_offset(lane);
        const float own_scale = is_tree ? scales.tree[2 * row] : lane < length ? scales.log[lane] : 0.f;
        const float query_scale = is_tree ? scales.tree[2 * row + 1] : 0.f;
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
        auto log_column = [&](int source) {
#if LOG_BLOCKS == 2
          const float first = (float)log_G, rest = (float)(log_G - first), scale = lane < length ? scales.log[lane] : 0.f;
          return Column{shuffle(first, source), shuffle(rest, source), shuffle(scale, source)};
#else
          return column_of(source);
#endif
        };
#pragma unroll 1
        for (int block = 0; of_log && sees_log && block < (LOG_BLOCKS == 2 && second_block ? 2 : 1); block++) {
          float gram[PAIRS][2][4] = {};
          const u32 log_address = shared_address(log_keys) + block * 32 * DIM, b_offset = b_key_offset(lane);
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
          const int r = 16 * block + 2 * t;
          const Column columns[4] = {log_column(r), log_column(r + 1), log_column(r + 8), log_column(r + 9)};
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
            head.log[block][i][lane] = make_uint4(hi[0], hi[1], lo[0], lo[1]);
          }
        }
#endif
        if (of_tree) {
          const float from_base = exp_near_one(G_first);
          if (row >= 0 && row < ROWS)
            head.factor[row] = make_float4(beta, -beta * own_scale * from_base, query_scale * from_base,
                                           __uint_as_float((u32)(record_base + tree_record) * record_bytes));
          // The record of the gates; it overwrites no row of the log.
          if (is_tree && (heads > 1 || cta_tile % TILES_PER_HEAD == 0))
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
                *(is_query ? &head.C[r][c] : &head.L[c][r]) = sees ? x : 0.f;  // L by columns
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
          } else {
            // A lane per column of T; lanes with one column share the rows of C T.
            const int c = lane % ROWS, part = lane / ROWS;
            float T[ROWS], made[SHARE];
#pragma unroll
            for (int i = 0; i < ROWS; i++) T[i] = i == c ? 1.f : 0.f;
#pragma unroll
            for (int i = 0; i < ROWS - 1; i++)  // T[i] is known: what it takes from the rows after it
#pragma unroll
              for (int m = (i + 1) / 4 * 4; m < ROWS; m += 4) {
                const float4 l = *(const float4*)&head.L[i][m];
                if (m > i) T[m] = fmaf(-l.x, T[i], T[m]);
                if (m + 1 > i) T[m + 1] = fmaf(-l.y, T[i], T[m + 1]);
                if (m + 2 > i) T[m + 2] = fmaf(-l.z, T[i], T[m + 2]);
                T[m + 3] = fmaf(-l.w, T[i], T[m + 3]);
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
        }
      }
      // The warps of a head wait for each other; where heads have more than one, the host gives a CTA two at most.
      const int sharers = min(32 * TILES_PER_HEAD / tiles_per_warp, THREADS);
      if (tiles_per_warp == TILES_PER_HEAD) __syncwarp();
      else if (heads == 1) __syncthreads();
      else if (head_of_key == cta_tile / TILES_PER_HEAD) barrier<1>(sharers);
      else barrier<2>(sharers);
      if (KEEP) {
#if LOG_BLOCKS
#pragma unroll
        for (int block = 0; block < LOG_BLOCKS; block++) log_kept[block] = head.log[block][0][lane];
#endif
        factor_kept[0] = head.factor[t];
        tree_kept[0] = head.tree[0][lane];
      }
    }
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
    u32 hi[LOG_BLOCKS][4], mid[LOG_BLOCKS][4], lo[LOG_BLOCKS][4];
#pragma unroll
    for (int i = 0; i < 2 * LOG_BLOCKS; i++)
      if (sees_log && (i < 2 || second_block)) {
        const int b = i / 2, c = 2 * (i & 1);
#if LOG_BF16  // exact in one part
        const u32 first = *(const u32*)logged(side, 2 * i), second = *(const u32*)logged(side, 2 * i + 1);
        hi[b][c] = __byte_perm(first, second, 0x5410), hi[b][c + 1] = __byte_perm(first, second, 0x7632);
#else
        const float2 first = load_u(logged(side, 2 * i)), second = load_u(logged(side, 2 * i + 1));
        split3(first.x, second.x, hi[b][c], mid[b][c], lo[b][c]);
        split3(first.y, second.y, hi[b][c + 1], mid[b][c + 1], lo[b][c + 1]);
#endif
      }
#endif
    if (STAGES > 1) {
      __syncwarp();  // every lane has read v and u
      if (n + STAGES < tiles_per_warp) copy_rows(first_side + side_place);
      copy_commit();
    }
#if LOG_BLOCKS
#pragma unroll
    for (int b = 0; b < LOG_BLOCKS; b++)
      if (sees_log && (b == 0 || second_block)) {
        float small[GROUPS][4] = {};  // a second chain where there are few
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const uint4 w = KEEP ? log_kept[b] : head.log[b][i][lane];
          float(&second)[4] = CHAINS ? small[i] : x[i];
          if (!LOG_BF16) {
            mma(second, lo[b], w.x, w.y);
            mma(second, mid[b], w.z, w.w);
          }
          mma(LOG_BF16 ? second : x[i], hi[b], w.z, w.w);
          if (!LOG_BF16) mma(second, mid[b], w.x, w.y);
          mma(x[i], hi[b], w.x, w.y);
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
        split(x[2 * p][2 * e], 2 * p + 1 < GROUPS ? x[2 * p + 1 < GROUPS ? 2 * p + 1 : 0][2 * e] : 0.f, parts[p][0][e],
               parts[p][1][e], parts[p][2][e]);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      float small[4] = {};
      float(&second)[4] = CHAINS ? small : x[i];
#pragma unroll
      for (int p = 0; p <= i / 2; p++) {
        const uint4 w = KEEP ? tree_kept[KEEP ? i : 0] : head.tree[tree_block(i, p)][lane];
        if (PARTS == 3) {
          mma8(second, parts[p][2], w.x);
          mma8(second, parts[p][0], w.z);
          mma8(second, parts[p][1], w.y);
        }
        mma8(x[i], parts[p][0], w.y);
        mma8(second, parts[p][1], w.x);
        mma8(x[i], parts[p][0], w.x);
      }
      if (CHAINS) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[i][e] += small[e];
      }
      const u32 to = u_offset + __float_as_uint(KEEP ? factor_kept[KEEP ? i : 0].w : head.factor[4 * i + t].w);
      if (4 * i + t < rows) {
        store_u((log_t*)((u8*)u_records + to), x[i][0], x[i][2]);
        *(u32*)((u8*)output + (out_offset + 8 * i * value_heads * DIM)) = pack_bf16(x[i][1], x[i][3]);
      }
    }
    side_place = side_place == (SIDES - 1) * SIDE_BYTES ? 0 : side_place + SIDE_BYTES;
    u_offset += 16 * (u32)sizeof(log_t);
    out_offset += 32;
  }
}
