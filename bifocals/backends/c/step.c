/* One decoding step in float32 on a CPU: keys and values lie in time order, and only those that are read are touched.

A register holds numbers of one vector here, not of several queries: each head has but one. A reader is the heads that
read the same keys by the same groups. Its keys are listed first (the sinks, those beyond the window whose group it
reads, what is near) and cut into pieces, for threads to share; a piece stays at hand for all heads of the reader. */

#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define PIECE 512 /* keys */

typedef struct {
    Vectors query, key, value, out; /* one query a head */
    Membership reads;
    const int16_t *numbers; /* of the groups of all keys beyond the window, from 1 on; 0: none */
    int64_t routers, of_batch, of_router; /* of the numbers */
    const int64_t *starts;                /* where each row of the batch begins */
    int64_t batches, heads, kv_heads, keys, dim, window, sinks;
    float scale;
} Step;

enum { TOP, SUM, OUT }; /* of what a head has read: the largest logit, the sum of weights, then the output */

typedef struct {
    int64_t first, count; /* of the list of keys */
    int64_t batch, reader;
} Piece;

INLINE int64_t readers_of(const Step *step) { return most(step->kv_heads, step->reads.routers); }

/* The keys of a reader; returns how many. */
static int64_t list_keys(const Step *step, int64_t batch, int64_t reader, int32_t *list) {
    const int64_t readers = readers_of(step);
    const uint8_t *reads = member(&step->reads, batch, reader * step->reads.routers / readers, 0);
    const int16_t *number = step->numbers + batch * step->of_batch + reader * step->routers / readers * step->of_router;
    const int64_t start = step->starts[batch], near = most(start, step->keys - 1 - step->window);
    const int64_t far = least(start + step->sinks, near);
    int64_t count = 0;
    for (int64_t key = start; key < far; key++) list[count++] = (int32_t)key;
    for (int64_t key = far; key < near; key++) {
        list[count] = (int32_t)key;
        count += number[key] > 0 && reads[number[key] - 1];
    }
    for (int64_t key = near; key < step->keys; key++) list[count++] = (int32_t)key;
    return count;
}

/* Logits of WIDTH keys, in powers of two; those beyond `count` are closed. */
INLINE vec logits_of(const Step *step, const float *query, const float *key, const int32_t *list, int64_t count) {
    vec square[WIDTH];
    float rest[WIDTH];
    for (int j = 0; j < WIDTH; j++) {
        const float *of_key = key + list[least(j, count - 1)] * step->key.token;
        int64_t d = 0;
        square[j] = all(0.0f), rest[j] = 0;
        for (; d + WIDTH <= step->dim; d += WIDTH)
            square[j] += *(const loose_vec *)(query + d) * *(const loose_vec *)(of_key + d);
        for (; d < step->dim; d++) rest[j] += query[d] * of_key[d];
    }
    transpose(square);
    vec logits = *(const loose_vec *)rest;
    for (int j = 0; j < WIDTH; j++) logits += square[j];
    for (int j = (int)count; j < WIDTH; j++) logits[j] = -INFINITY;
    return logits * (step->scale * (float)M_LOG2E);
}

static void attend_piece(const Step *step, const int32_t *list, const Piece *piece, int64_t head, float *part) {
    const int64_t kv_head = head * step->kv_heads / step->heads;
    const float *query = vector(&step->query, piece->batch, head, 0);
    const float *key = vector(&step->key, piece->batch, kv_head, 0);
    const float *value = vector(&step->value, piece->batch, kv_head, 0);
    vec logits[PIECE / WIDTH], top = all(-INFINITY), sum = all(0.0f);
    const int64_t blocks = (piece->count + WIDTH - 1) / WIDTH;
    for (int64_t block = 0; block < blocks; block++) {
        logits[block] = logits_of(step, query, key, list + block * WIDTH, least(WIDTH, piece->count - block * WIDTH));
        top = larger(logits[block], top);
    }
    float *out = part + OUT;
    part[TOP] = -INFINITY, part[SUM] = 0;
    for (int j = 0; j < WIDTH; j++) part[TOP] = fmaxf(top[j], part[TOP]);
    const float finite = part[TOP] == -INFINITY ? 0 : part[TOP]; /* where nothing is a number */
    for (int64_t block = 0; block < blocks; block++) sum += logits[block] = power_of_two(logits[block] - finite);
    for (int j = 0; j < WIDTH; j++) part[SUM] += sum[j];
    int64_t d = 0;
    for (; d + 4 * WIDTH <= step->dim; d += 4 * WIDTH) {
        vec sums[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
        for (int64_t j = 0; j < piece->count; j++) {
            const float *of_key = value + list[j] * step->value.token + d;
            const float weight = ((const float *)logits)[j];
            for (int v = 0; v < 4; v++) sums[v] += *(const loose_vec *)(of_key + v * WIDTH) * weight;
        }
        for (int v = 0; v < 4; v++) *(loose_vec *)(out + d + v * WIDTH) = sums[v];
    }
    memset(out + d, 0, (step->dim - d) * sizeof(float));
    for (int64_t j = 0; d < step->dim && j < piece->count; j++)
        for (int64_t e = d; e < step->dim; e++)
            out[e] += value[list[j] * step->value.token + e] * ((const float *)logits)[j];
}

/* What a head has read of `count` pieces, as one; their parts lie `stride` apart. */
static void join_parts(const Step *step, const float *part, int64_t count, int64_t stride, float *out) {
    float top = -INFINITY, sum = 0;
    memset(out, 0, step->dim * sizeof(float));
    for (int64_t each = 0; each < count; each++) top = fmaxf(part[each * stride + TOP], top);
    for (int64_t each = 0; each < count; each++) sum += part[each * stride + SUM] * exp2f(part[each * stride + TOP] - top);
    for (int64_t each = 0; each < count; each++) {
        const float weight = exp2f(part[each * stride + TOP] - top) / sum;
        for (int64_t d = 0; d < step->dim; d++) out[d] += part[each * stride + OUT + d] * weight;
    }
}

/* 0, or 1 if there was not enough memory. */
int focus_step(const Step *step) {
    const int64_t readers = readers_of(step), lists = step->batches * readers, heads = step->heads / readers;
    const int64_t most_pieces = lists * ((step->keys + PIECE - 1) / PIECE), size = OUT + step->dim;
    int32_t *keys = malloc(lists * step->keys * sizeof *keys);
    int64_t *counts = malloc(lists * sizeof *counts), total = 0;
    Piece *pieces = malloc(most_pieces * sizeof *pieces);
    float *parts = malloc(most_pieces * heads * size * sizeof *parts);
    const int has_memory = keys && counts && pieces && parts;
    if (has_memory) {
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t list = 0; list < lists; list++)
                counts[list] = list_keys(step, list / readers, list % readers, keys + list * step->keys);
#pragma omp single
            for (int64_t list = 0; list < lists; list++)
                for (int64_t first = 0; first < counts[list]; first += PIECE) {
                    const int64_t count = least(PIECE, counts[list] - first);
                    pieces[total++] = (Piece){list * step->keys + first, count, list / readers, list % readers};
                }
#pragma omp for schedule(dynamic)
            for (int64_t each = 0; each < total; each++)
                for (int64_t head = 0; head < heads; head++)
                    attend_piece(step, keys + pieces[each].first, pieces + each, pieces[each].reader * heads + head,
                                 parts + (each * heads + head) * size);
        }
        for (int64_t list = 0, first = 0; list < lists; list++) {
            const int64_t count = (counts[list] + PIECE - 1) / PIECE;
            for (int64_t head = 0; head < heads; head++)
                join_parts(step, parts + (first * heads + head) * size, count, heads * size,
                           vector(&step->out, list / readers, list % readers * heads + head, 0));
            first += count;
        }
    }
    free(keys), free(counts), free(pieces), free(parts);
    return !has_memory;
}
