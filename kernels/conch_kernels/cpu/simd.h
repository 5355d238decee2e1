// Sixteen lanes of float, and the two element types that weights, activations and KV are made of.
//
// The vectors are the compiler's own vector extension, so one source serves AVX-512, AVX2 and any other target
// (it splits what the CPU cannot hold in one register). Only what has no such form is spelled out: the bf16
// dot product, conversions and prefetch.
//
// Panels: a matrix that is read as the right operand of a product lies in panels of LANES columns. Down a
// panel, `fold` successive rows are stored side by side for each column, because one instruction multiplies
// and adds that many: [rows / fold][LANES][fold]. fp32 has fold 1, bf16 fold 2.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace conch {

constexpr int LANES = 16;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef int8_t I8 __attribute__((vector_size(16)));

constexpr I32 LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct bf16 {
    uint16_t bits;
};

template <class V, class T>
inline V load_as(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline F32 load(const float* p) { return load_as<F32>(p); }
inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }
inline F32 splat(float x) { return F32{} + x; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{uint16_t((bits >> 16) | 0x40)};
    return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline F32 load(const bf16* p) { return (F32)(__builtin_convertvector(load_as<U16>(p), U32) << 16); }

inline void store(bf16* p, F32 v) {
#if defined(__AVX512BF16__)
    __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &packed, sizeof packed);
#else
    U32 bits = (U32)v;
    U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    U32 nan = (bits >> 16) | 0x40;
    U32 is_nan = (U32)((bits & 0x7fffffff) > 0x7f800000);
    U16 packed = __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), U16);
    std::memcpy(p, &packed, sizeof packed);
#endif
}

inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) { *p = to_bf16(x); }

// How an element type is multiplied: `fold` of them at a time in each lane, summed in fp32.
template <class E>
struct Element;

// Not multiplied as it is, but widened, four at a time.
template <>
struct Element<int8_t> {
    static constexpr int fold = 4;
};

template <>
struct Element<float> {
    static constexpr int fold = 1;
    typedef F32 Vec;
    static Vec spread(const float* p) { return splat(*p); }
    static F32 dot(F32 sum, Vec a, Vec b) { return sum + a * b; }
};

template <>
struct Element<bf16> {
    static constexpr int fold = 2;
    typedef I32 Vec;
    static Vec spread(const bf16* p) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return I32{} + pair;
    }
    static F32 dot(F32 sum, Vec a, Vec b) {
#if defined(__AVX512BF16__)
        return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        sum += (F32)((U32)a << 16) * (F32)((U32)b << 16);
        return sum + (F32)(a & int32_t(0xffff0000)) * (F32)(b & int32_t(0xffff0000));
#endif
    }
};

// LANES columns of a panel, `fold` rows deep.
template <class E>
inline typename Element<E>::Vec load_panel(const E* p) {
    return load_as<typename Element<E>::Vec>(p);
}

inline float sum(F32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

inline float largest(F32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

inline F32 max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 min(F32 a, F32 b) { return a < b ? a : b; }

inline F32 round_to_int(F32 x) {
#if defined(__AVX512F__)
    return (F32)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const F32 magic = splat(12582912.f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
    return (x + magic) - magic;
#endif
}

// Rounds to nearest, ties to even; what is past int8 wraps.
inline void store(int8_t* p, F32 v) {
#if defined(__AVX512F__)
    __m128i packed = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v));
#else
    I8 packed = __builtin_convertvector(__builtin_convertvector(round_to_int(v), I32), I8);
#endif
    std::memcpy(p, &packed, sizeof packed);
}

// 2^x to about 2 ulp: x = n + f with |f| <= 1/2, a polynomial for 2^f (its Taylor series in f ln 2, to the sixth
// degree) and n added to the exponent. Below -126 the result is 0; above 127 it saturates.
inline F32 exp2(F32 x) {
    F32 clipped = min(max(x, splat(-127.f)), splat(127.f));
    F32 n = round_to_int(clipped);
    F32 f = clipped - n;
    F32 p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
    I32 exponent = (__builtin_convertvector(n, I32) + 127) << 23;
    F32 power = p * (F32)exponent;  // for n = -127 the exponent field is 0, and so is the product
    return x != x ? x : power;
}

constexpr float LOG2_E = 1.44269504088896f;

inline F32 exp(F32 x) { return exp2(x * LOG2_E); }
inline F32 tanh(F32 x) { return 1.f - 2.f / (exp(2.f * x) + 1.f); }

// 1 / x to about 2 ulp, for x from 2^-126 to 2^126: a Newton step from the CPU's own estimate. Above that it may be 0.
inline F32 inverse(F32 x) {
#if defined(__AVX512F__)
    const F32 y = (F32)_mm512_rcp14_ps((__m512)x);
    return y * (2.f - x * y);
#else
    return 1.f / x;
#endif
}

inline F32 sigmoid(F32 x) { return inverse(1.f + exp(-x)); }

// Past the caches, where that can be: nothing will read it soon. Others see it after `end_stores_past`.
inline void store_past(float* p, F32 v) {
#if defined(__AVX512F__)
    if (reinterpret_cast<uintptr_t>(p) % 64 == 0) return _mm512_stream_ps(p, (__m512)v);
#endif
    store(p, v);
}

inline void end_stores_past() {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

inline void prefetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }
inline void prefetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

}  // namespace conch
