// Verify attention: the rows of a draft tree against a paged bf16 KV cache, grouped-query heads of 256.
//
// A request has seq_len tokens in the cache; the last `rows` of them are its tree (root first), written there before, as
// engines do. Row t sees every token before the tree and, among the tree's rows, those in its ancestor mask:
//     o[t, h] = sum_j softmax_j(scale q[t, h] . k[j]) v[j],   j < seq_len - rows, or bit j - (seq_len - rows) of mask[t]
//
// Work. An item is a request, a KV head and a block of ROWS query rows: row r of a KV head is head r % group of tree row
// r / group, so keys and values are read once for a whole group and tree (once per block where rows x group > ROWS). The
// tiles of TILE keys of all items form one line; every CTA of a grid that fills the GPU once takes an equal stretch of it,
// whatever the lengths. An item inside one stretch is written at once; the others leave fp32 parts, at most two per CTA,
// for `combine_attention`. No length is needed on the host, so both launches can be captured and replayed.
//
// One CTA has ROW_GROUPS x GROUP_WARPS warps. The warps of a group share 16 M_TILES rows: each multiplies them with
// its own WARP_KEYS keys of the tile (Q K^T), they agree on row maxima and exchange the weights through shared memory
// as bf16, then each multiplies the weights of the whole tile with its own 256 / GROUP_WARPS dims of V. Scores, sums and
// outputs are fp32; outputs stay in registers over an item.
// Lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1 of every 16 x 8 product.
//
// Shared memory: the queries; a ring of SLOTS tiles, keys and values in turn, filled by cp.async SLOTS - 1 tiles ahead;
// weights; masks; row maxima. Rows are 512 bytes, their 16-byte pieces swapped by the low bits of the row.
// Traffic per request and KV head: 1024 bytes per token, 1024 per query row (q and o), 2 x 1032 per row and part.
#include "common.cuh"

#ifndef WARPGROUPS  // 0: mma.sync; otherwise warpgroups of 64 rows, for Hopper alone (sm_90a)
#define WARPGROUPS 0
#endif
#if WARPGROUPS
#define M_TILES 1
#define ROW_GROUPS (4 * WARPGROUPS)
#define GROUP_WARPS 1
#define WARP_KEYS 64
#endif
#ifndef M_TILES
#define M_TILES 1
#endif
#ifndef ROW_GROUPS
#define ROW_GROUPS 1
#endif
#ifndef GROUP_WARPS
#define GROUP_WARPS 4
#endif
#ifndef WARP_KEYS
#define WARP_KEYS 16
#endif
#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 2
#endif

// Scores run a tile ahead of the outputs, where the ring is long enough.
#define AHEAD (WARPGROUPS && SLOTS >= 5)

constexpr int HEAD = 256, ROW_BYTES = 2 * HEAD;
constexpr int WARPS = ROW_GROUPS * GROUP_WARPS, THREADS = 32 * WARPS;
constexpr int GROUP_ROWS = 16 * M_TILES, ROWS = GROUP_ROWS * ROW_GROUPS;
constexpr int TILE = GROUP_WARPS * WARP_KEYS, WARP_DIMS = HEAD / GROUP_WARPS;
constexpr int SLOT_BYTES = TILE * ROW_BYTES;              // of a tile of K or V
constexpr int WEIGHT_BYTES = WARPGROUPS ? 0 : 2 * TILE;  // of a row of weights in shared memory
constexpr int KEY_GROUPS = TILE / 16;                                  // a page holds whole groups of 16 tokens
static_assert(TILE >= 64 && WARP_KEYS % 16 == 0 && SLOTS >= 2, "tile");

struct Small {
  u64 mask[ROWS];
  float exchange[GROUP_WARPS][ROWS];  // row maxima of a tile, row sums at the end
};
#ifdef EXPECTED_SHARED_BYTES
static_assert(ROWS * (ROW_BYTES + WEIGHT_BYTES) + SLOTS * SLOT_BYTES + sizeof(Small) == EXPECTED_SHARED_BYTES,
              "AttentionPlan.shared_bytes");
#endif

// Weights may grow to 2^SLACK before outputs are rescaled to a higher maximum.
constexpr float SLACK = 8.f;
constexpr float NO_SCORE = -1e30f;  // finite, so that differences are numbers

DEVICE void copy_async16_or_zero(u32 shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// All tiles but the `left` youngest that are being loaded have come, for the whole CTA.
template <int left>
DEVICE void wait_for_tiles() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
#if WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncthreads();
}

// Where piece `lane` of row first + i of a tile of `rows` rows is, `first` a multiple of 8. Warpgroup products want columns
// of 128 bytes.
DEVICE u32 piece_offset(int first, int i, int lane, int rows) {
#if WARPGROUPS
  return ((lane >> 3) * rows + first + i) * 128 + ((lane & 7) ^ (i & 7)) * 16;
#else
  return (first + i) * ROW_BYTES + (lane ^ (i & 7)) * 16;
#endif
}

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE void group_barrier(int group) {
  if (ROW_GROUPS == 1) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * GROUP_WARPS) : "memory");
}

#if WARPGROUPS
// ---- products of a warpgroup: 64 rows, operands in shared memory as columns of 128 bytes, 128-byte swizzle ----

constexpr u64 SWIZZLE_128 = 1ull << 62;
// 8 rows are 1024 bytes apart. The 64 rows or keys x 16 dims at `address`:
DEVICE u64 tile_of_rows(u32 address) { return SWIZZLE_128 | 1024ull / 16 << 32 | 1ull << 16 | (address & 0x3ffff) >> 4; }
// 16 keys x 256 dims, dims contiguous: columns of 64 dims are TILE x 128 bytes apart.
DEVICE u64 tile_of_columns(u32 address) {
  return SWIZZLE_128 | 1024ull / 16 << 32 | (u64)(TILE * 128 / 16) << 16 | (address & 0x3ffff) >> 4;
}
DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait for all products but the `left` youngest and name their results, so that the compiler reads none of them earlier.
template <int left, int TILES>
DEVICE void warpgroup_wait(float (&c)[TILES][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
#pragma unroll
  for (int j = 0; j < TILES; j++)
    asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}

#define REGISTERS_4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define REGISTERS_16(c, j) REGISTERS_4(c, j), REGISTERS_4(c, j + 1), REGISTERS_4(c, j + 2), REGISTERS_4(c, j + 3)

// c[64 x 64] (+)= a[64 x 16] b[64 x 16]^T
DEVICE void warpgroup_scores(float (&c)[8][4], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : REGISTERS_16(c, 0), REGISTERS_16(c, 4) : "l"(a), "l"(b), "r"(add));
}

// c[64 x 256] += a[64 x 16] b[16 x 256], a in registers
DEVICE void warpgroup_outputs(float (&c)[32][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
      : REGISTERS_16(c, 0), REGISTERS_16(c, 4), REGISTERS_16(c, 8), REGISTERS_16(c, 12), REGISTERS_16(c, 16),
        REGISTERS_16(c, 20), REGISTERS_16(c, 24), REGISTERS_16(c, 28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

DEVICE int tiles_of(int seq_len, int rows) { return seq_len < rows ? 0 : (seq_len + TILE - 1) / TILE; }

// Sums over the lanes before this one, this one included.
DEVICE int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
verify_attention(const u16* __restrict__ q, int q_pitch, const u16* __restrict__ k_cache,
                 const u16* __restrict__ v_cache, i64 page_stride, int token_stride, int page_tokens,
                 const int* __restrict__ block_table, int table_pitch, const int* __restrict__ seq_lens,
                 const u64* __restrict__ masks, int mask_pitch, u16* __restrict__ output, float* __restrict__ part,
                 float2* __restrict__ part_sums, int* __restrict__ plan, int batch, int rows, int kv_heads, int group,
                 int row_blocks, int min_tiles, float scale_log2) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int row_group = warp / GROUP_WARPS, part_of_group = warp % GROUP_WARPS;

  extern __shared__ __align__(1024) u8 memory[];
  const u32 queries = shared_address(memory), ring = queries + ROWS * ROW_BYTES;
  [[maybe_unused]] const u32 weights = ring + SLOTS * SLOT_BYTES;
  Small& small = *(Small*)(memory + ROWS * (ROW_BYTES + WEIGHT_BYTES) + SLOTS * SLOT_BYTES);

  // ---- this CTA's stretch of the line ----
  const int items = kv_heads * row_blocks;  // per request
  int total = 0;
  for (int b = lane; b < batch; b += 32) total += tiles_of(seq_lens[b], rows);
  total = __reduce_add_sync(0xffffffffu, total) * items;
  const int stretch = max((total + (int)gridDim.x - 1) / (int)gridDim.x, min_tiles);
  int position = blockIdx.x * stretch;
  const int end = min(position + stretch, total);

  if (blockIdx.x == gridDim.x - 1 && warp == 0) {  // for combine_attention
    int before = 0;
    for (int first = 0; first < batch; first += 32) {
      const int b = first + lane, tiles = b < batch ? tiles_of(seq_lens[b], rows) : 0;
      const int sum = inclusive_sum(tiles, lane);
      if (b < batch) plan[b] = before + sum - tiles;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) plan[batch] = stretch;
  }
  if (position >= end) return;

  int request = 0, tile, item, tiles;
  {
    const int wanted = position / items;  // tiles of the requests before this one are at most as many
    int before = 0;
    for (int first = 0;; first += 32) {
      const int b = first + lane, mine = b < batch ? tiles_of(seq_lens[b], rows) : 0;
      const int sum = inclusive_sum(mine, lane);
      const u32 hit = __ballot_sync(0xffffffffu, wanted < before + sum);
      if (hit) {
        const int source = __ffs(hit) - 1;
        request = first + source;
        before += __shfl_sync(0xffffffffu, sum - mine, source);
        break;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    tiles = tiles_of(seq_lens[request], rows);
    const int inside = position - before * items;
    item = inside / tiles, tile = inside - item * tiles;
  }

  while (true) {
    const int count = min(tiles - tile, end - position);
    const int kv_head = item / row_blocks, first_row = item % row_blocks * ROWS;
    const int seq_len = seq_lens[request], context = seq_len - rows;
    const int* table = block_table + (i64)request * table_pitch;

    // ---- loads: queries and masks, then tiles of keys and values in turn ----
    for (int r = warp; r < ROWS; r += WARPS) {
      const int row = first_row + r, tree_row = row / group;
      const bool there = tree_row < rows;
      const u16* source = q + ((i64)request * rows + (there ? tree_row : 0)) * q_pitch +
                          (kv_head * group + row - tree_row * group) * HEAD + lane * 8;
      copy_async16_or_zero(queries + piece_offset(0, r, lane, ROWS), there ? source : q, there);
    }
    for (int r = tid; r < ROWS; r += THREADS) {
      const int tree_row = (first_row + r) / group;
      small.mask[r] = tree_row < rows ? masks[(i64)request * mask_pitch + tree_row] : ~0ull;
    }
    // Tiles come as K0 V0 K1 V1 …; with AHEAD as K0 K1 V0 K2 V1 …, the scores of a tile ahead of the outputs.
    int loaded = 0, load_tile = tile, page = 0, inside = 0;  // lane i % KEY_GROUPS looks up 16 keys of a tile
    i64 place = 0, last_place = 0;
    auto look_up = [&](int next) {
      const int key = next * TILE + 16 * (lane % KEY_GROUPS);
      page = inside = 0;
      if (key < seq_len) {
        const int entry = key / page_tokens;
        inside = key - entry * page_tokens;
        page = table[entry];
      }
    };
    look_up(load_tile);
    auto load_next = [&]() {
      if (loaded < 2 * count) {
        const bool last = loaded == 2 * count - 1;
        const bool values = AHEAD ? loaded > 0 && (loaded % 2 == 0 || last) : loaded % 2;
        if (!values) {
          last_place = place;
          place = (i64)page * page_stride + (i64)inside * token_stride;
          look_up(++load_tile);
        }
        const bool before = AHEAD && values && !last;  // the values of the tile before the last keys
        const int first_key = (load_tile - 1 - before) * TILE;
        const i64 of_lane = before ? last_place : place;
        const u16* cache = (values ? v_cache : k_cache) + kv_head * HEAD + lane * 8;
        const u32 slot = ring + loaded % SLOTS * SLOT_BYTES;
        constexpr int PER_WARP = (TILE + WARPS - 1) / WARPS;
        static_assert(16 % PER_WARP || PER_WARP % 8 == 0, "piece_offset");
        if (16 % PER_WARP == 0) {  // a warp's rows lie in one page
          const int first = warp * PER_WARP, left = seq_len - first_key - first;
          const u16* source = cache + __shfl_sync(0xffffffffu, of_lane, first >> 4) + (first & 15) * token_stride;
#pragma unroll
          for (int i = 0; i < PER_WARP; i++, source += token_stride)
            copy_async16_or_zero(slot + piece_offset(first, i, lane, TILE), source, i < left);
        } else {
#pragma unroll
          for (int i = 0; i < PER_WARP; i++) {
            const int r = i * WARPS + warp;
            if (r >= TILE) break;
            const i64 start = __shfl_sync(0xffffffffu, of_lane, r >> 4);
            copy_async16_or_zero(slot + piece_offset(0, r, lane, TILE), cache + start + (r & 15) * token_stride,
                                 first_key + r < seq_len);
          }
        }
      }
      loaded++;
      copy_commit();
    };
#pragma unroll
    for (int i = 0; i < SLOTS - 1; i++) load_next();

    float o[M_TILES][WARP_DIMS / 8][4] = {};
    float highest[M_TILES][2], sum[M_TILES][2] = {};
#pragma unroll
    for (int m = 0; m < M_TILES; m++) highest[m][0] = highest[m][1] = NO_SCORE;

    int slot = 0;  // that is used next
    auto next_slot = [&]() {
      const u32 address = ring + slot * SLOT_BYTES;
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
      return address;
    };
    auto hide = [&](float (&s)[M_TILES][WARP_KEYS / 8][4], int n) {  // keys of the tree that are no ancestors, or no keys
      if ((tile + n + 1) * TILE <= context) return;
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        const int row = row_group * GROUP_ROWS + m * 16 + g;
        const u64 mask[2] = {small.mask[row], small.mask[row + 8]};
#pragma unroll
        for (int j = 0; j < WARP_KEYS / 8; j++) {
          const int drafted = (tile + n) * TILE + part_of_group * WARP_KEYS + j * 8 + 2 * t - context;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int bit = drafted + (i & 1);
            if (bit >= 0 && (bit >= rows || !(mask[i >> 1] >> bit & 1))) s[m][j][i] = NO_SCORE;
          }
        }
      }
    };
    // Scores to weights, rounded to bf16, in place; returns whether outputs must be multiplied by `factor` first. The sums
    // are those of the rounded weights, so that a row with one large weight has no error from it.
    auto weigh = [&](float (&s)[M_TILES][WARP_KEYS / 8][4], float (&factor)[M_TILES][2]) {
      float own[M_TILES][2];
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float x = NO_SCORE;
#pragma unroll
          for (int j = 0; j < WARP_KEYS / 8; j++) x = fmaxf(x, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
          x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
          own[m][half] = x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
          if (GROUP_WARPS > 1 && t == 0)
            small.exchange[part_of_group][row_group * GROUP_ROWS + m * 16 + half * 8 + g] = x;
        }
      if (GROUP_WARPS > 1) group_barrier(row_group);
      bool same = true;
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float x = fmaxf(highest[m][half], own[m][half]);
#pragma unroll
          for (int w = 0; w < GROUP_WARPS; w++)
            if (GROUP_WARPS > 1) x = fmaxf(x, small.exchange[w][row_group * GROUP_ROWS + m * 16 + half * 8 + g]);
          if ((x - highest[m][half]) * scale_log2 <= SLACK) x = highest[m][half];
          const float base = x == NO_SCORE ? 0.f : x * scale_log2;
          factor[m][half] = exp2_fast(highest[m][half] * scale_log2 - base);
          same = same && x == highest[m][half];
          highest[m][half] = x;
          float added = 0.f;
#pragma unroll
          for (int j = 0; j < WARP_KEYS / 8; j++) {
            const u32 pair = pack_bf16(exp2_fast(fmaf(s[m][j][2 * half], scale_log2, -base)),
                                       exp2_fast(fmaf(s[m][j][2 * half + 1], scale_log2, -base)));
            s[m][j][2 * half] = low_half(pair), s[m][j][2 * half + 1] = high_half(pair);
            added += s[m][j][2 * half] + s[m][j][2 * half + 1];
          }
          sum[m][half] = fmaf(sum[m][half], factor[m][half], added);
        }
      return !__all_sync(0xffffffffu, same);
    };
    auto rescale = [&](const float (&factor)[M_TILES][2]) {
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int d = 0; d < WARP_DIMS / 8; d++)
#pragma unroll
          for (int i = 0; i < 4; i++) o[m][d][i] *= factor[m][i >> 1];
    };

#if WARPGROUPS
    const u32 own_queries = queries + (warp >> 2) * 64 * 128;
    auto score = [&](float (&s)[1][8][4], u32 keys) {
      warpgroup_begin();
#pragma unroll
      for (int step = 0; step < HEAD / 16; step++)
        warpgroup_scores(s[0], tile_of_rows(own_queries + (step >> 2) * ROWS * 128 + (step & 3) * 32),
                         tile_of_rows(keys + (step >> 2) * TILE * 128 + (step & 3) * 32), step > 0);
      warpgroup_commit();
    };
    u32 weight[TILE / 16][4];  // not changed while products are under way
    auto pack = [&](const float (&s)[1][8][4]) {
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          weight[j >> 1][2 * (j & 1) + half] = pack_bf16(s[0][j][2 * half], s[0][j][2 * half + 1]);
    };
    auto add_values = [&](u32 values) {
      warpgroup_begin();
#pragma unroll
      for (int k = 0; k < TILE / 16; k++) warpgroup_outputs(o[0], weight[k], tile_of_columns(values + k * 16 * 128));
      warpgroup_commit();
    };
    float s[1][8][4], factor[1][2];
    wait_for_tiles<SLOTS - 2>();
    if (!AHEAD) load_next();
    score(s, next_slot());
    warpgroup_wait<0>(s[0]);
    hide(s, 0);
    weigh(s, factor);
    pack(s);
#pragma unroll 1
    for (int n = 0; n + 1 < count; n++) {
#if AHEAD
      wait_for_tiles<SLOTS - 4>();
      score(s, next_slot());
      add_values(next_slot());
      load_next(), load_next();
      warpgroup_wait<1>(s[0]);
      hide(s, n + 1);
      const bool changed = weigh(s, factor);
      warpgroup_wait<0>(o[0]);
#else
      wait_for_tiles<SLOTS - 2>();
      add_values(next_slot());
      load_next();
      warpgroup_wait<0>(o[0]);
      wait_for_tiles<SLOTS - 2>();
      score(s, next_slot());
      load_next();
      warpgroup_wait<0>(s[0]);
      hide(s, n + 1);
      const bool changed = weigh(s, factor);
#endif
      if (changed) rescale(factor);
      pack(s);
    }
    wait_for_tiles<0>();
    add_values(next_slot());
    warpgroup_wait<0>(o[0]);
#else
    // Where load_matrix4 finds this lane's row: as an A operand or (transposed) V block, and as a block of keys.
    const int low_row = lane & 7;
    const u32 a_row = (lane & 15) * ROW_BYTES, a_piece = ((lane >> 4) ^ low_row) * 16;
    const u32 k_row = (low_row + (lane >> 4) * 8) * ROW_BYTES, k_piece = (((lane >> 3) & 1) ^ low_row) * 16;
    const u32 own_queries = queries + row_group * GROUP_ROWS * ROW_BYTES + a_row;
    const u32 own_weights = weights + row_group * GROUP_ROWS * WEIGHT_BYTES;
#pragma unroll 1
    for (int n = 0; n < count; n++) {
      wait_for_tiles<SLOTS - 2>();
      load_next();
      float s[M_TILES][WARP_KEYS / 8][4] = {}, factor[M_TILES][2];
      const u32 keys = next_slot() + part_of_group * WARP_KEYS * ROW_BYTES + k_row;
#pragma unroll 4
      for (int step = 0; step < HEAD / 16; step++) {
        const u32 far = (step >> 2) * 128, near = (step & 3) * 32;
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) load_matrix4(a[m], own_queries + m * 16 * ROW_BYTES + far + (a_piece ^ near));
#pragma unroll
        for (int j = 0; j < WARP_KEYS / 16; j++) {
          u32 b[4];
          load_matrix4(b, keys + j * 16 * ROW_BYTES + far + (k_piece ^ near));
#pragma unroll
          for (int m = 0; m < M_TILES; m++) {
            mma(s[m][2 * j], a[m], b[0], b[1]);
            mma(s[m][2 * j + 1], a[m], b[2], b[3]);
          }
        }
      }
      hide(s, n);
      const bool changed = weigh(s, factor);
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int j = 0; j < WARP_KEYS / 8; j++) {
            const int piece = (part_of_group * (WARP_KEYS / 8) + j) ^ g;
            asm volatile("st.shared.b32 [%0], %1;" ::
                         "r"(own_weights + (m * 16 + half * 8 + g) * WEIGHT_BYTES + piece * 16 + t * 4),
                         "r"(pack_bf16(s[m][j][2 * half], s[m][j][2 * half + 1])) : "memory");
          }
      if (changed) rescale(factor);

      wait_for_tiles<SLOTS - 2>();  // the weights have come, too
      load_next();
      const u32 values = next_slot() + a_row + part_of_group * WARP_DIMS * 2;
#pragma unroll
      for (int k = 0; k < TILE / 16; k++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
          load_matrix4(a[m], own_weights + (m * 16 + (lane & 15)) * WEIGHT_BYTES + (k >> 2) * 128 +
                                 (a_piece ^ ((k & 3) * 32)));
#pragma unroll
        for (int d = 0; d < WARP_DIMS / 16; d++) {
          u32 b[4];
          load_matrix4_transposed(b, values + k * 16 * ROW_BYTES + (d >> 2) * 128 + (a_piece ^ ((d & 3) * 32)));
#pragma unroll
          for (int m = 0; m < M_TILES; m++) {
            mma(o[m][2 * d], a[m], b[0], b[1]);
            mma(o[m][2 * d + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
#endif

    // ---- the item's sums, then its outputs or a part of them ----
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float x = sum[m][half];
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        if (t == 0) small.exchange[part_of_group][row_group * GROUP_ROWS + m * 16 + half * 8 + g] = x;
      }
    __syncthreads();
    const bool whole = count == tiles;
    const i64 part_index = 2 * (i64)blockIdx.x + (tile == 0);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = row_group * GROUP_ROWS + m * 16 + half * 8 + g, row = first_row + r, tree_row = row / group;
        if (tree_row >= rows) continue;
        float x = 0.f;
#pragma unroll
        for (int w = 0; w < GROUP_WARPS; w++) x += small.exchange[w][r];
        if (whole) {
          const float inverse = 1.f / x;
          u16* target = output + (((i64)request * rows + tree_row) * kv_heads * group + kv_head * group + row -
                                  tree_row * group) * HEAD + part_of_group * WARP_DIMS + 2 * t;
#pragma unroll
          for (int d = 0; d < WARP_DIMS / 8; d++)
            *(u32*)(target + d * 8) = pack_bf16(o[m][d][2 * half] * inverse, o[m][d][2 * half + 1] * inverse);
        } else {
          float* target = part + (part_index * ROWS + r) * HEAD + part_of_group * WARP_DIMS + 2 * t;
#pragma unroll
          for (int d = 0; d < WARP_DIMS / 8; d++)
            *(float2*)(target + d * 8) = make_float2(o[m][d][2 * half], o[m][d][2 * half + 1]);
          if (t == 0 && part_of_group == 0)
            part_sums[part_index * ROWS + r] = make_float2(highest[m][half] * scale_log2, x);
        }
      }

    // ---- the next item ----
    position += count;
    if (position >= end) break;
    tile = 0;
    if (++item == items) {
      item = 0;
      do request++;
      while (tiles_of(seq_lens[request], rows) == 0);
      tiles = tiles_of(seq_lens[request], rows);
    }
    __syncthreads();  // exchange and queries are free
  }
}

// Outputs of the items that several CTAs shared: parts weighted by e^{highest - overall highest}. One or more warps of a
// CTA of 8 per row; a lane holds 8 dims.
extern "C" __global__ void __launch_bounds__(256)
combine_attention(const float* __restrict__ part, const float2* __restrict__ part_sums, const int* __restrict__ plan,
                  const int* __restrict__ seq_lens, u16* __restrict__ output, int batch, int rows, int kv_heads,
                  int group, int row_blocks, int warps_per_row) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int share = warp % warps_per_row;
  const int row_index = (blockIdx.x * 8 + warp) / warps_per_row;
  const int head_rows = rows * group;
  const int request = row_index / (head_rows * kv_heads);
  int first = 0, last = 0, kv_head = 0, row = 0, r = 0;
  bool first_is_start = false;
  if (request < batch) {
    const int stretch = plan[batch], tiles = tiles_of(seq_lens[request], rows);
    kv_head = row_index / head_rows % kv_heads, row = row_index % head_rows, r = row % ROWS;
    const int start = plan[request] * kv_heads * row_blocks + (kv_head * row_blocks + row / ROWS) * tiles;
    if (tiles > 0) first = start / stretch, last = (start + tiles - 1) / stretch;
    first_is_start = true;
  }
  const bool shared_item = last > first;
  // The CTA that begins the item leaves its part second, all others first.
  auto index_of = [&](int cta) { return (2 * (i64)cta + (first_is_start && cta == first)) * ROWS + r; };

  float highest = NO_SCORE, sum = 0.f, o[8] = {};
  if (shared_item) {
    for (int cta = first + lane; cta <= last; cta += 32) highest = fmaxf(highest, part_sums[index_of(cta)].x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
#pragma unroll 4
    for (int cta = first + share; cta <= last; cta += warps_per_row) {
      const i64 index = index_of(cta);
      const float2 own = part_sums[index];
      const float4 low = *(const float4*)(part + index * HEAD + lane * 4);
      const float4 high = *(const float4*)(part + index * HEAD + 128 + lane * 4);
      const float weight = exp2_fast(own.x - highest);
      sum = fmaf(own.y, weight, sum);
      o[0] = fmaf(low.x, weight, o[0]), o[1] = fmaf(low.y, weight, o[1]);
      o[2] = fmaf(low.z, weight, o[2]), o[3] = fmaf(low.w, weight, o[3]);
      o[4] = fmaf(high.x, weight, o[4]), o[5] = fmaf(high.y, weight, o[5]);
      o[6] = fmaf(high.z, weight, o[6]), o[7] = fmaf(high.w, weight, o[7]);
    }
  }
  if (warps_per_row > 1) {
    __shared__ float others[8][9][32];
    others[warp][8][lane] = sum;
#pragma unroll
    for (int i = 0; i < 8; i++) others[warp][i][lane] = o[i];
    __syncthreads();
    if (share > 0) return;
    for (int w = 1; w < warps_per_row; w++) {
      sum += others[warp + w][8][lane];
#pragma unroll
      for (int i = 0; i < 8; i++) o[i] += others[warp + w][i][lane];
    }
  }
  if (!shared_item) return;
  const float inverse = 1.f / sum;
  const int tree_row = row / group;
  u16* target =
      output + (((i64)request * rows + tree_row) * kv_heads * group + kv_head * group + row - tree_row * group) * HEAD;
  *(uint2*)(target + lane * 4) = make_uint2(pack_bf16(o[0] * inverse, o[1] * inverse),
                                            pack_bf16(o[2] * inverse, o[3] * inverse));
  *(uint2*)(target + 128 + lane * 4) = make_uint2(pack_bf16(o[4] * inverse, o[5] * inverse),
                                                  pack_bf16(o[6] * inverse, o[7] * inverse));
}
