/* Focus attention in float32 on a CPU: only the pairs that are read, computed where their vectors lie.

A block is as many queries as fill three registers, one query to a lane. Whatever keys they read come by in turn, and
each number of a key or value is multiplied into all lanes at once:

    logits[key][lane]  +=  key[d]   * query[d][lane]         masks, maxima and sums are per lane: no shuffling,
    out[d][lane]       +=  value[d] * weight[key][lane]      and keys and values are neither copied nor sorted

What a lane reads of a list of keys is one interval, low <= place < high:

    near     the list is time itself, around the query; blocks are consecutive queries
    sinks    the first tokens of the segment, as far as they are not near
    far      the list is a group in time order, without sinks, up to the window; blocks are queries of the group

Far blocks fold their result into what is there, by its log-sum-exp. Every query is in one near block; where queries are
in several groups, one group is done after the other, so that no two threads hold the same query. A key in several
groups is read in the first that it shares with the query.

Threads are those of OpenMP, which torch uses too: others would fight with them for the cores. */

#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define VECTORS 3
#define ROWS (WIDTH * VECTORS) /* queries of a block */
#define KEYS 64                /* whose logits are computed before they become weights */
#define DEPTH 4                /* blocks that read the same keys one after the other, while those are at hand */
#define LINE 16                /* floats that memory hands over together */

typedef struct {
    Vectors query, key, value, out, lse; /* the last has one number a token */
    Membership reads, holds;
    const int64_t *segments; /* batch x keys, -1: padding; or none */
    int64_t batches, heads, kv_heads, queries, keys, dim, groups;
    int64_t window, sinks, reach, is_causal;
    float scale;
} Problem;

/* The members of each group of each stream (a row of the batch seen by a router), in time order. */
typedef struct {
    int32_t *tokens;
    int64_t *first; /* of the members of group g of stream s: [s * groups + g]; one more at the end */
    int is_single;  /* no token is in several groups */
} Lists;

typedef struct {
    const Problem *problem;
    int32_t *start, *end; /* of each key's segment, batch x keys */
    Lists queries, keys;
    uint64_t *key_groups; /* if keys are in several: of each stream and key, a bit for each group */
} Plan;

/* Some queries of one head, DEPTH blocks at most: consecutive ones (group NEAR), or members of a group. */
typedef struct {
    int32_t batch, head, group, first, count;
} Work;

enum { NEAR = -1 };

typedef struct {
    vec *query, *out; /* dim x VECTORS */
    vec logits[KEYS][VECTORS], top[VECTORS], sum[VECTORS];
    ivec low[VECTORS], high[VECTORS];
    int64_t first, last, all_from, all_to; /* places that some lane reads, and that all read */
    uint64_t already[ROWS];                /* groups of the query in which keys that are in several were read before */
    int64_t row[ROWS];
} Block;

/* to[d][lane] = from[lane][d] */
static void turn_in(const float *const from[ROWS], int64_t dim, vec *to) {
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH)
        for (int v = 0; v < VECTORS; v++) {
            vec square[WIDTH];
            for (int row = 0; row < WIDTH; row++) square[row] = *(const loose_vec *)(from[v * WIDTH + row] + d);
            transpose(square);
            for (int row = 0; row < WIDTH; row++) to[(d + row) * VECTORS + v] = square[row];
        }
    for (; d < dim; d++)
        for (int lane = 0; lane < ROWS; lane++) to[d * VECTORS + lane / WIDTH][lane % WIDTH] = from[lane][d];
}

/* to[lane][d] = from[d][lane] * factor[lane] */
static void turn_out(const vec *from, int64_t dim, const vec factor[VECTORS], float *to) {
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH)
        for (int v = 0; v < VECTORS; v++) {
            vec square[WIDTH];
            for (int row = 0; row < WIDTH; row++) square[row] = from[(d + row) * VECTORS + v] * factor[v];
            transpose(square);
            for (int row = 0; row < WIDTH; row++) *(loose_vec *)(to + (v * WIDTH + row) * dim + d) = square[row];
        }
    for (; d < dim; d++)
        for (int lane = 0; lane < ROWS; lane++)
            to[lane * dim + d] = from[d * VECTORS + lane / WIDTH][lane % WIDTH] * factor[lane / WIDTH][lane % WIDTH];
}

INLINE void tile_of_logits(const vec *query, const float *const *key, int64_t dim, vec (*logits)[VECTORS]) {
    vec sums[COLUMNS][VECTORS];
    memset(sums, 0, sizeof sums);
    const float *column[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) column[c] = key[c];
    for (int64_t d = 0; d < dim; d++)
        for (int c = 0; c < COLUMNS; c++)
            for (int v = 0; v < VECTORS; v++) sums[c][v] += query[d * VECTORS + v] * column[c][d];
    for (int c = 0; c < COLUMNS; c++)
        for (int v = 0; v < VECTORS; v++) logits[c][v] = sums[c][v];
}

/* out = out * kept + weighted values, of `columns` dimensions from the d-th on. */
INLINE void tile_of_values(Block *block, const float *const *value, int64_t from, int64_t to, int64_t d, int columns,
                           const vec *kept) {
    vec sums[COLUMNS][VECTORS];
    memset(sums, 0, sizeof sums);
    for (int64_t key = from; key < to; key++)
        for (int c = 0; c < columns; c++)
            for (int v = 0; v < VECTORS; v++) sums[c][v] += block->logits[key][v] * value[key][d + c];
    for (int c = 0; c < columns; c++)
        for (int v = 0; v < VECTORS; v++) {
            vec *out = block->out + (d + c) * VECTORS + v;
            *out = *out * kept[v] + sums[c][v];
        }
}

/* Groups are scattered over memory: no processor foresees where the next keys lie. */
static void foresee(const Problem *problem, const float *key, const float *value, const int32_t *list, int64_t count) {
    for (int64_t at = 0; at < count; at++)
        for (int64_t d = 0; d < problem->dim; d += LINE) {
            __builtin_prefetch(key + list[at] * problem->key.token + d);
            __builtin_prefetch(value + list[at] * problem->value.token + d);
        }
}

/* Close what is outside the intervals of the lanes, and what a lane has read already. */
static void close_logits(Block *block, int64_t place, int64_t from, int64_t to, const int32_t *list,
                         const uint64_t *key_groups) {
    for (int64_t j = from; j < to; j++) {
        const int32_t at = (int32_t)(place + j);
        for (int v = 0; v < VECTORS; v++) {
            const ivec is_inside = (at >= block->low[v]) & (at < block->high[v]);
            block->logits[j][v] = choose(is_inside, block->logits[j][v], all(-INFINITY));
        }
        for (int lane = 0; key_groups && lane < ROWS; lane++)
            if (key_groups[list[at]] & block->already[lane]) block->logits[j][lane / WIDTH][lane % WIDTH] = -INFINITY;
    }
}

/* Turn logits, in powers of two, into weights; `kept`: what becomes of earlier weights. */
static void weigh(Block *block, int64_t from, int64_t to, vec kept[VECTORS]) {
    for (int v = 0; v < VECTORS; v++) {
        vec top = block->top[v], sum = all(0.0f);
        for (int64_t j = from; j < to; j++) top = larger(block->logits[j][v], top);
        const vec finite = choose(top == -INFINITY, all(0.0f), top); /* nothing read yet: no inf - inf */
        for (int64_t j = from; j < to; j++) {
            block->logits[j][v] = power_of_two(block->logits[j][v] - finite);
            sum += block->logits[j][v];
        }
        kept[v] = power_of_two(block->top[v] - finite);
        block->sum[v] = block->sum[v] * kept[v] + sum;
        block->top[v] = top;
    }
}

/* Read some keys of a list, from `place` on. */
static void read_keys(Block *block, const Problem *problem, const float *const *key, const float *const *value,
                      int64_t place, int64_t keys, const int32_t *list, const uint64_t *key_groups) {
    const int64_t from = most(0, block->first - place) / COLUMNS * COLUMNS, to = least(keys, block->last - place);
    if (from >= to) return;
    const float scale = problem->scale * (float)M_LOG2E;
    for (int64_t j = from; j < to; j += COLUMNS)
        tile_of_logits(block->query, key + j, problem->dim, block->logits + j);
    for (int64_t j = from; j < to; j++)
        for (int v = 0; v < VECTORS; v++) block->logits[j][v] *= scale;
    if (place + from < block->all_from || place + to > block->all_to || key_groups)
        close_logits(block, place, from, to, list, key_groups);
    vec kept[VECTORS];
    weigh(block, from, to, kept);
    int64_t d = 0;
    for (; d + COLUMNS <= problem->dim; d += COLUMNS) tile_of_values(block, value, from, to, d, COLUMNS, kept);
    for (; d < problem->dim; d++) tile_of_values(block, value, from, to, d, 1, kept);
}

/* Read a list of keys (time, without one), each lane what is in its interval. */
static void read_list(Block *blocks, int count, const Problem *problem, const float *key, const float *value,
                      const int32_t *list, const uint64_t *key_groups) {
    int64_t first = INT32_MAX, last = 0;
    for (Block *block = blocks; block < blocks + count; block++) {
        block->first = INT32_MAX, block->last = 0, block->all_from = 0, block->all_to = INT32_MAX;
        for (int lane = 0; lane < ROWS; lane++) {
            const int64_t low = block->low[lane / WIDTH][lane % WIDTH], high = block->high[lane / WIDTH][lane % WIDTH];
            block->all_from = most(block->all_from, low), block->all_to = least(block->all_to, high);
            if (low < high) block->first = least(block->first, low), block->last = most(block->last, high);
        }
        first = least(first, block->first), last = most(last, block->last);
    }
    for (int64_t place = first; place < last; place += KEYS) {
        const int64_t keys = least(KEYS, last - place), next = place + KEYS;
        const float *of_key[KEYS], *of_value[KEYS];
        for (int64_t j = 0; j < KEYS; j++) { /* the last once more, to fill up a tile */
            const int64_t at = place + least(j, keys - 1), token = list ? list[at] : at;
            of_key[j] = key + token * problem->key.token;
            of_value[j] = value + token * problem->value.token;
        }
        if (list && next < last) foresee(problem, key, value, list + next, least(KEYS, last - next));
        for (Block *block = blocks; block < blocks + count; block++)
            read_keys(block, problem, of_key, of_value, place, keys, list, key_groups);
    }
}

/* How many members of an ascending list lie before a position. */
static int64_t count_before(const int32_t *list, int64_t length, int64_t position) {
    int64_t low = 0, high = length;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (list[middle] < position) low = middle + 1;
        else high = middle;
    }
    return low;
}

INLINE int64_t stream_of(const Problem *problem, const Membership *side, const Work *work) {
    return work->batch * side->routers + work->head * side->routers / problem->heads;
}

INLINE uint64_t groups_of(const uint8_t *member, int64_t groups) {
    uint64_t found = 0;
    for (int64_t group = 0; group < groups; group++) found |= (uint64_t)(member[group] != 0) << group;
    return found;
}

INLINE void set_interval(Block *block, int lane, int64_t low, int64_t high) {
    block->low[lane / WIDTH][lane % WIDTH] = (int32_t)low;
    block->high[lane / WIDTH][lane % WIDTH] = (int32_t)high;
}

/* What queries read near, and of the sinks. */
static void read_near(const Plan *plan, const Work *work, Block *blocks, int count, const float *key,
                      const float *value) {
    const Problem *problem = plan->problem;
    const int32_t *start = plan->start + work->batch * problem->keys, *end = plan->end + work->batch * problem->keys;
    const int64_t offset = problem->keys - problem->queries, apart = least(problem->window, problem->reach - 1);
    for (int lane = 0; lane < count * ROWS; lane++) {
        const int64_t at = offset + blocks[lane / ROWS].row[lane % ROWS];
        const int64_t after = problem->is_causal ? at + 1 : least(end[at], at + apart + 1);
        set_interval(blocks + lane / ROWS, lane % ROWS, most(start[at], at - apart), after);
    }
    read_list(blocks, count, problem, key, value, NULL, NULL);
    for (int side = 0; problem->sinks && side < (problem->is_causal ? 1 : 2); side++) { /* before what is near, after */
        for (int lane = 0; lane < count * ROWS; lane++) {
            const int64_t at = offset + blocks[lane / ROWS].row[lane % ROWS], sinks = start[at] + problem->sinks;
            const int64_t from = side ? at + apart + 1 : most(start[at], at - problem->reach + 1);
            const int64_t to = side ? least(end[at], at + problem->reach) : at - apart;
            set_interval(blocks + lane / ROWS, lane % ROWS, from, least(to, sinks));
        }
        read_list(blocks, count, problem, key, value, NULL, NULL);
    }
}

/* What they read far away, in one group. */
static void read_far(const Plan *plan, const Work *work, Block *blocks, int count, const float *key,
                     const float *value) {
    const Problem *problem = plan->problem;
    const int32_t *start = plan->start + work->batch * problem->keys, *end = plan->end + work->batch * problem->keys;
    const int64_t stream = stream_of(problem, &problem->holds, work), offset = problem->keys - problem->queries;
    const int64_t *bounds = plan->keys.first + stream * problem->groups + work->group;
    const int64_t length = bounds[1] - bounds[0], router = work->head * problem->reads.routers / problem->heads;
    const int32_t *list = plan->keys.tokens + bounds[0];
    const uint64_t *key_groups = plan->keys.is_single ? NULL : plan->key_groups + stream * problem->keys;
    for (int lane = 0; key_groups && lane < count * ROWS; lane++) {
        Block *block = blocks + lane / ROWS;
        const uint8_t *reads = member(&problem->reads, work->batch, router, block->row[lane % ROWS]);
        block->already[lane % ROWS] = groups_of(reads, problem->groups) & ((1ull << work->group) - 1);
    }
    for (int side = 0; side < (problem->is_causal ? 1 : 2); side++) {
        for (int lane = 0; lane < count * ROWS; lane++) {
            const int64_t at = offset + blocks[lane / ROWS].row[lane % ROWS];
            const int64_t from = side ? at + problem->window + 1 : most(start[at], at - problem->reach + 1);
            const int64_t to = side ? least(end[at], at + problem->reach) : at - problem->window;
            const int64_t low = count_before(list, length, from);
            set_interval(blocks + lane / ROWS, lane % ROWS, low, count_before(list, length, to));
        }
        read_list(blocks, count, problem, key, value, list, key_groups);
    }
}

/* Write what the first `count` lanes have read, or fold it into what is there. */
static void return_rows(const Problem *problem, const Work *work, const Block *block, int count, float *rows) {
    const int64_t dim = problem->dim;
    vec factor[VECTORS];
    for (int v = 0; v < VECTORS; v++) factor[v] = choose(block->sum[v] == 0.0f, all(0.0f), 1.0f / block->sum[v]);
    turn_out(block->out, dim, factor, rows);
    for (int lane = 0; lane < count; lane++) {
        float *out = vector(&problem->out, work->batch, work->head, block->row[lane]);
        float *lse = vector(&problem->lse, work->batch, work->head, block->row[lane]);
        const float *part = rows + lane * dim, sum = block->sum[lane / WIDTH][lane % WIDTH];
        const float part_lse = (block->top[lane / WIDTH][lane % WIDTH] + log2f(sum)) * (float)M_LN2;
        if (work->group == NEAR) {
            memcpy(out, part, dim * sizeof(float));
            *lse = part_lse;
        } else if (sum != 0) {
            const float ratio = expf(-fabsf(*lse - part_lse)), large = 1 / (1 + ratio), small = ratio * large;
            const float before = *lse > part_lse ? large : small, now = *lse > part_lse ? small : large;
            for (int64_t d = 0; d < dim; d++) out[d] = out[d] * before + part[d] * now;
            *lse = fmaxf(*lse, part_lse) + log1pf(ratio);
        }
    }
}

static void attend(const Plan *plan, const Work *work, Block *blocks, float *rows) {
    const Problem *problem = plan->problem;
    const int64_t kv_head = work->head * problem->kv_heads / problem->heads;
    const float *key = vector(&problem->key, work->batch, kv_head, 0);
    const float *value = vector(&problem->value, work->batch, kv_head, 0);
    const int64_t list = stream_of(problem, &problem->reads, work) * problem->groups + work->group;
    const int32_t *members = work->group == NEAR ? NULL : plan->queries.tokens + plan->queries.first[list];
    const int count = (work->count + ROWS - 1) / ROWS;
    for (int each = 0; each < count; each++) {
        Block *block = blocks + each;
        const float *vectors[ROWS];
        for (int lane = 0; lane < ROWS; lane++) { /* the last once more, to fill up the block */
            const int64_t at = work->first + least(each * ROWS + lane, work->count - 1);
            block->row[lane] = members ? members[at] : at;
            vectors[lane] = vector(&problem->query, work->batch, work->head, block->row[lane]);
        }
        turn_in(vectors, problem->dim, block->query);
        memset(block->out, 0, problem->dim * VECTORS * sizeof(vec));
        for (int v = 0; v < VECTORS; v++) block->top[v] = all(-INFINITY), block->sum[v] = all(0.0f);
    }
    if (members) read_far(plan, work, blocks, count, key, value);
    else read_near(plan, work, blocks, count, key, value);
    for (int each = 0; each < count; each++)
        return_rows(problem, work, blocks + each, (int)least(ROWS, work->count - each * ROWS), rows);
}

/* Where the segment of each token starts and ends. */
static void find_segments(const Problem *problem, int32_t *start, int32_t *end) {
    const int64_t keys = problem->keys;
    for (int64_t batch = 0; batch < problem->batches; batch++) {
        const int64_t *segment = problem->segments ? problem->segments + batch * keys : NULL;
        for (int64_t first = 0, last; first < keys; first = last) {
            for (last = segment ? first + 1 : keys; last < keys && segment[last] == segment[first];) last++;
            for (int64_t token = first; token < last; token++) {
                start[batch * keys + token] = (int32_t)first;
                end[batch * keys + token] = (int32_t)last;
            }
        }
    }
}

/* Count the members of each group (tokens is NULL) or list them; neither padding nor the first `sinks` of a segment. */
static int visit_members(const Plan *plan, const Membership *side, int64_t length, int64_t sinks, int64_t *place,
                         int32_t *tokens) {
    const Problem *problem = plan->problem;
    const int64_t groups = problem->groups;
    int is_single = 1;
#pragma omp parallel for schedule(dynamic) reduction(&& : is_single)
    for (int64_t stream = 0; stream < problem->batches * side->routers; stream++) {
        const int64_t batch = stream / side->routers, offset = problem->keys - length;
        const int32_t *start = plan->start + batch * problem->keys + offset;
        const int64_t *segment = problem->segments ? problem->segments + batch * problem->keys + offset : NULL;
        for (int64_t token = 0; token < length; token++) {
            if ((segment && segment[token] < 0) || offset + token - start[token] < sinks) continue;
            uint64_t left = groups_of(member(side, batch, stream % side->routers, token), groups);
            is_single = is_single && !(left & (left - 1));
            for (; left; left &= left - 1) {
                int64_t *of_group = place + stream * groups + __builtin_ctzll(left);
                if (tokens) tokens[*of_group] = (int32_t)token;
                (*of_group)++;
            }
        }
    }
    return is_single;
}

/* Returns whether there was memory. */
static int list_members(const Plan *plan, const Membership *side, int64_t length, int64_t sinks, Lists *lists) {
    const int64_t count = plan->problem->batches * side->routers * plan->problem->groups;
    int64_t *first = lists->first = calloc(count + 1, sizeof *first), total = 0;
    if (!first) return 0;
    lists->is_single = visit_members(plan, side, length, sinks, first, NULL);
    for (int64_t list = 0; list <= count; list++) {
        const int64_t members = first[list];
        first[list] = total;
        total += members;
    }
    if (!(lists->tokens = malloc((total + 1) * sizeof *lists->tokens))) return 0;
    visit_members(plan, side, length, sinks, first, lists->tokens);
    memmove(first + 1, first, count * sizeof *first); /* every place has moved on to the end of its list */
    first[0] = 0;
    return 1;
}

/* Returns how many; lists them if there is room. */
static int64_t list_near_work(const Plan *plan, Work *works) {
    const Problem *problem = plan->problem;
    const int64_t offset = problem->keys - problem->queries;
    int64_t count = 0;
    for (int64_t each = 0; each < problem->batches * problem->heads; each++) {
        const int64_t batch = each / problem->heads, row_of_batch = batch * problem->keys + offset;
        for (int64_t row = 0, last; row < problem->queries; row = last) {
            last = least(least(row + ROWS * DEPTH, problem->queries), plan->end[row_of_batch + row] - offset);
            if (problem->segments && problem->segments[row_of_batch + row] < 0) continue;
            if (works) works[count] = (Work){batch, each % problem->heads, NEAR, row, last - row};
            count++;
        }
    }
    return count;
}

/* The blocks of each group, up to ends[group]; of a list, long ones first. */
static int64_t list_far_work(const Plan *plan, Work *works, int64_t *ends) {
    const Problem *problem = plan->problem;
    const int64_t rows = ROWS * DEPTH;
    int64_t count = 0;
    for (int64_t group = 0; group < problem->groups; group++) {
        for (int64_t each = 0; each < problem->batches * problem->heads; each++) {
            Work work = {each / problem->heads, each % problem->heads, group, 0, 0};
            const int64_t *bounds =
                plan->queries.first + stream_of(problem, &problem->reads, &work) * problem->groups + group;
            const int64_t members = bounds[1] - bounds[0];
            for (int64_t left = (members + rows - 1) / rows; left > 0; left--, count++) {
                work.first = (left - 1) * rows;
                work.count = least(rows, members - work.first);
                if (works) works[count] = work;
            }
        }
        ends[group] = count;
    }
    return count;
}

/* What padding returns: nothing, at a log-sum-exp that makes its weights 0 on the way back. */
static void blank_padding(const Problem *problem) {
    for (int64_t batch = 0; problem->segments && batch < problem->batches; batch++)
        for (int64_t row = 0; row < problem->queries; row++) {
            if (problem->segments[(batch + 1) * problem->keys - problem->queries + row] >= 0) continue;
            for (int64_t head = 0; head < problem->heads; head++) {
                memset(vector(&problem->out, batch, head, row), 0, problem->dim * sizeof(float));
                *vector(&problem->lse, batch, head, row) = 1e30f;
            }
        }
}

/* Does the work up to the first end, then up to the second, and so on. Returns whether there was memory. */
static int run(const Plan *plan, const Work *works, const int64_t *ends, int64_t stages) {
    const Problem *problem = plan->problem;
    int has_memory = 1;
#pragma omp parallel
    {
        const size_t size = problem->dim * VECTORS * sizeof(vec); /* of what a block holds of its queries */
        Block *blocks = NULL;
        char *room = NULL;
        if (posix_memalign((void **)&blocks, 64, DEPTH * sizeof *blocks) ||
            posix_memalign((void **)&room, 64, (2 * DEPTH + 1) * size)) {
#pragma omp atomic write
            has_memory = 0;
        } else {
            for (int each = 0; each < DEPTH; each++) {
                blocks[each].query = (vec *)(room + 2 * each * size);
                blocks[each].out = (vec *)(room + (2 * each + 1) * size);
            }
        }
#pragma omp barrier
        for (int64_t stage = 0; has_memory && stage < stages; stage++) {
#pragma omp for schedule(dynamic)
            for (int64_t at = stage ? ends[stage - 1] : 0; at < ends[stage]; at++)
                attend(plan, works + at, blocks, (float *)(room + 2 * DEPTH * size));
        }
        free(blocks);
        free(room);
    }
    return has_memory;
}

static int list_key_groups(Plan *plan) {
    const Problem *problem = plan->problem;
    const int64_t routers = problem->holds.routers, count = problem->batches * routers * problem->keys;
    if (!(plan->key_groups = malloc(count * sizeof *plan->key_groups))) return 0;
    for (int64_t at = 0; at < count; at++) {
        const int64_t stream = at / problem->keys;
        const uint8_t *of_key = member(&problem->holds, stream / routers, stream % routers, at % problem->keys);
        plan->key_groups[at] = groups_of(of_key, problem->groups);
    }
    return 1;
}

static int make_plan(Plan *plan, const Problem *problem) {
    const int64_t size = problem->batches * problem->keys * sizeof(int32_t);
    *plan = (Plan){.problem = problem, .start = malloc(size), .end = malloc(size)};
    if (!plan->start || !plan->end) return 0;
    find_segments(problem, plan->start, plan->end);
    return 1;
}

static void drop_plan(Plan *plan) {
    free(plan->start), free(plan->end), free(plan->queries.tokens), free(plan->queries.first);
    free(plan->keys.tokens), free(plan->keys.first), free(plan->key_groups);
}

/* What is near, and the sinks. 0, or 1 if there was not enough memory. */
int focus_near(const Problem *problem) {
    Plan plan;
    Work *works = NULL;
    int is_done = make_plan(&plan, problem);
    if (is_done) {
        blank_padding(problem);
        works = malloc((list_near_work(&plan, NULL) + 1) * sizeof *works);
        const int64_t count = works ? list_near_work(&plan, works) : 0;
        is_done = works && run(&plan, works, &count, 1);
    }
    free(works);
    drop_plan(&plan);
    return !is_done;
}

/* What is far, folded into what is near. */
int focus_far(const Problem *problem) {
    Plan plan;
    Work *works = NULL;
    int64_t *ends = malloc((problem->groups + 1) * sizeof *ends);
    int is_done = make_plan(&plan, problem) && ends &&
                  list_members(&plan, &problem->reads, problem->queries, 0, &plan.queries) &&
                  list_members(&plan, &problem->holds, problem->keys, problem->sinks, &plan.keys) &&
                  (plan.keys.is_single || list_key_groups(&plan)) &&
                  (works = malloc((list_far_work(&plan, NULL, ends) + 1) * sizeof *works));
    if (is_done) {
        const int64_t count = list_far_work(&plan, works, ends);
        is_done = plan.queries.is_single ? run(&plan, works, &count, 1) : run(&plan, works, ends, problem->groups);
    }
    free(works), free(ends);
    drop_plan(&plan);
    return !is_done;
}
