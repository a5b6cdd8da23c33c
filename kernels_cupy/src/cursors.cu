// Bookkeeping that runs once per step for all layers: ancestor masks of the trees, and the log's row lists.
#include "common.cuh"

// masks[b, t]: bit i is set when row i lies on the path from the root to row t, t included. One warp per request, lanes
// walk up to the root. Rows 0 to 63.
extern "C" __global__ void tree_masks(const int* __restrict__ parent, u64* __restrict__ masks, int rows) {
  const int* above = parent + (i64)blockIdx.x * rows;
  for (int t = threadIdx.x; t < rows; t += blockDim.x) {
    u64 mask = 0;
    for (int row = t; row >= 0;) {
      mask |= 1ull << row;
      const int up = above[row];
      row = up < row ? up : -1;  // the parents of padding may be anything
    }
    masks[(i64)blockIdx.x * rows + t] = mask;
  }
}

// Append the accepted path of each request to its log, after the verification of all layers.
//
// row_list[b] is a permutation of the record_rows rows that a request owns: first the log_length[b] rows of its log,
// oldest first, then the rows that the next verification writes (tree row t goes to entry log_length[b] + t), then the
// rest. The verification flushed the log if log_length + reserve > capacity, by the same rule as here; then the list
// restarts with the accepted path. accepted[b] = -1 appends nothing. One warp per request, at most 128 rows.
extern "C" __global__ void advance(const int* __restrict__ accepted, const u64* __restrict__ masks, int mask_pitch,
                                   int* __restrict__ row_list, int* __restrict__ log_length, int rows,
                                   int record_rows, int capacity, int reserve) {
  const int b = blockIdx.x, lane = threadIdx.x;
  int* list = row_list + (i64)b * record_rows;
  const int length = log_length[b], node = accepted[b];
  const u64 path = node >= 0 && node < rows ? masks[(i64)b * mask_pitch + node] : 0;
  const bool flushed = length > 0 && length + reserve > capacity;
  const int kept = flushed ? 0 : length;
  const int appended = min(__popcll(path), capacity - kept);
  int row[4], place[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int p = lane + 32 * i;
    if (p >= record_rows) continue;
    row[i] = list[p];
    const int t = p - length;  // the tree row that was written at this entry
    const bool is_tree = t >= 0 && t < rows;
    const u64 below = t <= 0 ? 0 : (t >= 64 ? ~0ull : (1ull << t) - 1);
    const int before = min(__popcll(path & below), appended);  // accepted rows at earlier entries
    const bool accepted_here = is_tree && (path >> t & 1) && before < appended;
    const int stay = flushed ? 0 : min(p, length);
    if (p < length && !flushed) place[i] = p;
    else if (accepted_here) place[i] = kept + before;
    else place[i] = kept + appended + p - stay - before;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (lane + 32 * i < record_rows) list[place[i]] = row[i];
  if (lane == 0) log_length[b] = kept + appended;
}

// Commit by index: entry `rows` of slot_table[b] names the slot of the committed state, entries 0 to rows - 1 the slots
// that the next verification writes. The accepted row's slot and the committed slot change places.
extern "C" __global__ void commit_index(const int* __restrict__ accepted, int* __restrict__ slot_table, int rows,
                                        int batch) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch || accepted[b] < 0 || accepted[b] >= rows) return;
  int* slots = slot_table + (i64)b * (rows + 1);
  if (slots[rows] < 0) return;
  const int taken = slots[accepted[b]];
  slots[accepted[b]] = slots[rows];
  slots[rows] = taken;
}

// target <- source, 64 bytes per thread: the yardstick of every bandwidth figure.
extern "C" __global__ void copy_bytes(const uint4* __restrict__ source, uint4* __restrict__ target, i64 pieces) {
  const i64 first = (i64)blockIdx.x * blockDim.x * 4 + threadIdx.x;
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (first + i * blockDim.x < pieces) x[i] = __ldcs(source + first + i * blockDim.x);
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (first + i * blockDim.x < pieces) __stcs(target + first + i * blockDim.x, x[i]);
}

// Read 128 bytes per thread and write next to nothing: what a phase that only reads can reach at most.
extern "C" __global__ void read_bytes(const uint4* __restrict__ source, u32* __restrict__ found, i64 pieces) {
  const i64 first = (i64)blockIdx.x * blockDim.x * 8 + threadIdx.x;
  u32 all = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (first + i * blockDim.x < pieces) {
      const uint4 x = __ldcs(source + first + i * blockDim.x);
      all &= x.x & x.y & x.z & x.w;
    }
  if (all == 0xffffffffu) *found = all;  // keeps the loads alive; no float is made of ones only
}
