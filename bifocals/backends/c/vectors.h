/* Registers full of floats, and how tensors are handed over. */

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define WIDTH 16  /* floats of a register */
#define COLUMNS 8 /* keys, or dimensions, of a tile: three times as many sums stay in registers */
#elif defined(__AVX2__)
#define WIDTH 8
#define COLUMNS 4
#else
#define WIDTH 4
#define COLUMNS 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef float loose_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH))); /* whose sums may overflow */

/* Vectors by batch, head and token; the numbers of a vector lie together. Strides are in elements. */
typedef struct {
    float *data;
    int64_t batch, head, token;
} Vectors;

/* Which groups each token is in, one byte for each. */
typedef struct {
    const uint8_t *data;
    int64_t routers, batch, router, token;
} Membership;

INLINE float *vector(const Vectors *vectors, int64_t batch, int64_t head, int64_t token) {
    return vectors->data + batch * vectors->batch + head * vectors->head + token * vectors->token;
}

INLINE const uint8_t *member(const Membership *side, int64_t batch, int64_t router, int64_t token) {
    return side->data + batch * side->batch + router * side->router + token * side->token;
}

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vec choose(ivec condition, vec yes, vec no) {
    return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE vec all(float number) { return number - (vec){0}; }

/* 2^x for x <= 0 to the last place but one: 2^round(x) by the exponent, the rest by a polynomial of least error. */
INLINE vec power_of_two(vec x) {
    const vec shifted = x + 12582912.0f; /* 1.5 * 2^23: the integer is in the last bits */
    const vec rest = x - (shifted - 12582912.0f);
    vec result = all(0x1.41d332p-13f);
    result = result * rest + 0x1.5f456ap-10f;
    result = result * rest + 0x1.3b2dbcp-7f;
    result = result * rest + 0x1.c6aed4p-5f;
    result = result * rest + 0x1.ebfbdap-3f;
    result = result * rest + 0x1.62e430p-1f;
    result = result * rest + 1.0f;
    return choose(x < -126.0f, all(0.0f), (vec)((uvec)result + ((uvec)shifted << 23)));
}

/* Rows become columns: swap ever larger halves of pairs of rows. */
INLINE void transpose(vec square[WIDTH]) {
    ivec lane;
    for (int l = 0; l < WIDTH; l++) lane[l] = l;
    for (int step = 1; step < WIDTH; step *= 2) {
        const ivec upper = lane + (((lane & step) != 0) & (WIDTH - step)), lower = upper + step;
        for (int row = 0; row < WIDTH; row++) {
            if (row & step) continue;
            const vec a = square[row], b = square[row + step];
            square[row] = __builtin_shuffle(a, b, upper);
            square[row + step] = __builtin_shuffle(a, b, lower);
        }
    }
}
