// A part of verify_stream: the small matrices of a CTA's value heads, a task per head and kind, and the records of keys.
//
// stream.cu includes it before its tiles or between the first product and the use of that, as text: from a function
// object nvcc 13.0 orders the instructions around it otherwise.
#pragma unroll 1
  for (int task = first_task; task < kinds * heads; task += WARPS) {
    if (task != first_task) add_decays(load_gates(task));
    Head& head = head_table[head_of(task)];
    const bool of_log = LOG_BLOCKS && ((task ^ (task >> 1)) & 1);

    const float own_scale = is_tree ? shared.scale[2 * row] : lane < length ? shared.log_scale[lane] : 0.f;
    const float query_scale = is_tree ? shared.scale[2 * row + 1] : 0.f;
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
    // The record of the gates; no row of the log is overwritten.
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
    for (int r = tid / LANES; r < (rows + OF_WARP - 1) / OF_WARP * OF_WARP; r += ROWS_AT_ONCE) {
      const int to = shuffle(tree_record, 16 + r);
      if (r < rows)
        *(uint4*)(k_records + ((record_base + to) * key_heads + key_head) * DIM + piece * 8) =
            row_piece(keys, 2 * r, piece * 8);
    }
  }
  __syncthreads();  // the small matrices are complete
  if (KEEP) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#if LOG_BLOCKS
      log_kept[i] = head.log[i][lane];
#endif
      factor_kept[i] = head.factor[4 * i + t];
    }
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_TREE; i++) tree_kept[i] = head.tree[i][lane];
  }
