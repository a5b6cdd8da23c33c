// Shared by all kernels: storage types, bf16 conversion, tensor-core and asynchronous-copy primitives, gates.
//
// Conventions. DIM = K = V, the head dimension. A state is [HV, V, K], K contiguous. bf16 numbers travel as 16-bit
// words. Nothing here needs a CUDA header, so that NVRTC compiles it anywhere.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef DIM
#define DIM 128
#endif
#ifndef STATE_BF16
#define STATE_BF16 0
#endif
#ifndef LOG_BF16
#define LOG_BF16 0
#endif

#if STATE_BF16
typedef u16 state_t;
#else
typedef float state_t;
#endif
#if LOG_BF16
typedef u16 log_t;
#else
typedef float log_t;
#endif

#define DEVICE __device__ __forceinline__

constexpr int K_STEPS = DIM / 16;    // k-steps of one m16n8k16 product over the keys

// ---- bf16 ----

DEVICE float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE float low_half(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two floats rounded to nearest even; `first` in the low half, as memory order wants it.
DEVICE u32 pack_bf16(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// x = hi + lo to 17 significant bits.
DEVICE void split2(float x, float y, u32& hi, u32& lo) {
  hi = pack_bf16(x, y);
  lo = pack_bf16(x - low_half(hi), y - high_half(hi));
}

// x = hi + mid + lo to all 24 bits of a float.
DEVICE void split3(float x, float y, u32& hi, u32& mid, u32& lo) {
  hi = pack_bf16(x, y);
  const float rest_x = x - low_half(hi), rest_y = y - high_half(hi);
  mid = pack_bf16(rest_x, rest_y);
  lo = pack_bf16(rest_x - low_half(mid), rest_y - high_half(mid));
}

// stream.cu and wide.cu: bf16 parts of what becomes u, on its way there: R, T and a fold's weighted u. Two keep 17 bits, and
// a record in bf16 has 8. (commit.cu folds rows that are there already: its parts follow the state. verify.cu keeps three.)
constexpr int PARTS = LOG_BF16 ? 2 : 3;

// x in PARTS parts; two leave the third as it is.
DEVICE void split(float x, float y, u32& hi, u32& mid, u32& lo) {
  if (PARTS == 3) split3(x, y, hi, mid, lo);
  else split2(x, y, hi, mid);
}

// ---- tensor cores ----

// c[16 x 8] += a[16 x 16] b[16 x 8]; lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1 of c.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16 x 8] += a[16 x 8] b[8 x 8].
DEVICE void mma8(float (&c)[4], const u32 (&a)[2], u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}

// The product of 16 keys, kept in program order: where the compiler would run ahead and spill registers.
DEVICE void mma_in_order(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE void load_matrix4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

DEVICE void load_matrix4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Offset (bf16 elements) of this lane's row for load_matrix4 of a 16 x 16 block as a B operand: n is the row of the block,
// r[0] and r[1] belong to rows 0-7, r[2] and r[3] to rows 8-15.
DEVICE int b_block_offset(int lane, int pitch) { return ((lane & 7) + (lane >> 4) * 8) * pitch + ((lane >> 3) & 1) * 8; }

// ---- asynchronous copies, global to shared ----

DEVICE void copy_async16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// The same of what is to leave the L2 cache first.
DEVICE void copy_once16(u32 shared, const void* global) {
  asm volatile(
      "{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, policy;}" ::"r"(shared), "l"(global) : "memory");
}
// A cursor of a request: all launches of a step read it, and between two of them hundreds of MiB pass the L2 cache, where
// it is to stay.
DEVICE int load_cursor(const int* cursor) {
  int x;
  asm volatile(
      "{.reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
      "ld.global.L2::cache_hint.b32 %0, [%1], policy;}" : "=r"(x) : "l"(cursor));
  return x;
}
DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- chained launches ----

// A chained launch (programmatic dependent launch) starts while the one before it in its stream still runs. Until
// `wait_for_launch_before` it reads only what was there before that launch: states, logs, cursors, masks, weights; it may
// also fold logs into states. q, k, v, gates and everything else that is written come afterwards. A thread that lets the
// next launch start has waited, so the launch before is complete by then, and a launch has all launches but the one before
// it behind it. In an ordinary launch there is nothing to wait for; it lets a chained one after it start all the same.
DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// A pointer to what the launch before may have written: loads through it stay behind the wait.
template <typename T>
DEVICE void written_before(T& pointer) {
  u64 global = __cvta_generic_to_global(pointer);
  asm volatile("" : "+l"(global) : : "memory");
  pointer = (T)__cvta_global_to_generic(global);
}

// ---- the order of keys in shared memory ----

// The lane that owns a 16-byte piece of a state row uses all of it as operands of one (fp32) or two (bf16) k-steps.
// That permutes the keys inside groups of 16 or 32; keys and queries are stored in the same order. Returns where the
// pair of columns (column, column + 1), column even, is stored.
DEVICE int key_position(int column) {
#if STATE_BF16
  const int inner = column & 31;
  return (column & ~31) + ((inner >> 2) & 1) * 16 + (inner >> 3) * 2 + ((inner >> 1) & 1) * 8;
#else
  const int inner = column & 15;
  return (column & ~15) + (inner >> 2) * 2 + ((inner >> 1) & 1) * 8;
#endif
}

// Key rows in shared memory have no padding: the low bits of the row swap 16-byte pieces within 128 bytes, which makes
// load_matrix4 conflict-free. Eight consecutive columns of a row, from `column` on:
DEVICE void store_keys(u16* keys, int row, int column, uint4 words) {
  u16* target = keys + row * DIM;
  const int swap = (row & 7) << 3;
  *(u32*)(target + (key_position(column) ^ swap)) = words.x;
  *(u32*)(target + (key_position(column + 2) ^ swap)) = words.y;
  *(u32*)(target + (key_position(column + 4) ^ swap)) = words.z;
  *(u32*)(target + (key_position(column + 6) ^ swap)) = words.w;
}

// The same columns back from shared memory.
DEVICE uint4 load_keys(const u16* keys, int row, int column) {
  const u16* source = keys + row * DIM;
  const int swap = (row & 7) << 3;
  return make_uint4(*(const u32*)(source + (key_position(column) ^ swap)),
                    *(const u32*)(source + (key_position(column + 2) ^ swap)),
                    *(const u32*)(source + (key_position(column + 4) ^ swap)),
                    *(const u32*)(source + (key_position(column + 6) ^ swap)));
}

// Byte offset of this lane's row in a block of 16 key rows, as an A or B operand; k-step j is at offset ^ (32 j).
DEVICE u32 a_key_offset(int lane) { return (lane & 15) * 2 * DIM + (((lane >> 4) ^ (lane & 7)) << 4); }
DEVICE u32 b_key_offset(int lane) {
  return ((lane & 7) + (lane >> 4) * 8) * 2 * DIM + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

DEVICE float sum_of_squares(uint4 w) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float x = low_half(words[i]), y = high_half(words[i]);
    sum = fmaf(x, x, fmaf(y, y, sum));
  }
  return sum;
}

// The sum over COUNT neighbouring lanes, a power of two, in all of them.
template <int COUNT>
DEVICE float sum_over(float x) {
#pragma unroll
  for (int step = COUNT / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Sums of squares of rows, each in LANES neighbouring lanes; the rows' exchanges do not
// depend on each other, so that their latencies overlap.
template <int LANES, int COUNT>
DEVICE void sums_of_squares(const uint4 (&words)[COUNT], float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) sums[i] = sum_of_squares(words[i]);
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
}

// ---- gates ----

// A gate as it is stored. A load is waited for where its result is first used, conversion included: what has other loads to
// start keeps the bits until then.
DEVICE u32 load_gate(const void* gates, i64 index, int gates_bf16) {
  return gates_bf16 ? ((const u16*)gates)[index] : ((const u32*)gates)[index];
}
DEVICE float gate_value(u32 bits, int gates_bf16) {
  asm volatile("" : "+r"(bits));  // not before this place
  return __uint_as_float(gates_bf16 ? bits << 16 : bits);
}

// e^x, rounded to nearest where it is close to 1: what multiplies a state every step must not be off to one side.
DEVICE float exp_near_one(float x) { return x > -0.5f ? 1.f + expm1f(x) : expf(x); }

// g = -exp(A_log) softplus(a + dt_bias)
DEVICE float log_decay(float a, float A_log, float dt_bias) {
  const float x = a + dt_bias;
  return -expf(A_log) * (x > 20.f ? x : log1pf(expf(x)));
}

DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// ---- factor records ----

// u of two neighbouring value rows.
DEVICE float2 load_u(const log_t* pointer) {
#if LOG_BF16
  const u32 pair = *(const u32*)pointer;
  return make_float2(low_half(pair), high_half(pair));
#else
  return *(const float2*)pointer;
#endif
}
DEVICE void store_u(log_t* pointer, float first, float second) {
#if LOG_BF16
  *(u32*)pointer = pack_bf16(first, second);
#else
  *(float2*)pointer = make_float2(first, second);
#endif
}
