/*
 * Says which step of a multi_head_attention differs from the book's.  make check-c FILE=mine.c builds it of three
 * files:
 *
 *     cc -Dmulti_head_attention=book_attention -c attention.c -o book.o
 *     cc mine.c check.c book.o -lm -o check && ./check ../../tests/data/vectors.json
 *
 * Both functions get the same inputs: those of vectors.json, whose outputs the book's must have, and a few of its own.
 * A step that a file does not write is not compared, but for the last.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "attention.h"

void book_attention(const struct attention *a);

#define MOST_CASES 32
#define N_STEPS 7
static const real UNTOUCHED = -123456.75; /* what an array holds before a call */
static const double FLOAT_BOUND = 1e-5, BOUND = sizeof(real) == 4 ? 1e-5 : 1e-12;

static const struct {
    const char *name, *is;
} STEPS[N_STEPS] = {
    {"q", "q = queries W_q"},
    {"k", "k = keys W_k"},
    {"v", "v = values W_v"},
    {"scores", "score = q . k / sqrt(d), with d = num_hiddens / num_heads, over the columns of one head"},
    {"weights", "weights = exp(score - largest) / sum, over the keys; a key from valid_len on has the score -1000000"},
    {"context", "context = sum over the keys of weight v; head h has the columns from h * d on"},
    {"output", "output = context W_o"},
};

struct test {
    char name[40];
    struct attention a; /* its last seven arrays: those of the call at hand */
    real *mine[N_STEPS], *book[N_STEPS];
    double *expected;       /* of vectors.json, or NULL */
    int step, width, given; /* of which step it is; its numbers in a row, and how many of these are given */
};

static struct test tests[MOST_CASES];
static int n_tests;

/* Kept to the end, and known until then: a leak that a sanitizer tells of is the other file's. */
static void *
memory(size_t count, size_t size)
{
    static void *kept[MOST_CASES * 32];
    static size_t n_kept;
    void *found = calloc(count ? count : 1, size);
    if (!found || n_kept == sizeof kept / sizeof *kept) {
        fprintf(stderr, "no memory\n");
        exit(3);
    }
    return kept[n_kept++] = found;
}

/* ---- vectors.json ---------------------------------------------------------------------------------------------- */

struct numbers {
    double *x;
    int count, rank, shape[4]; /* rank 0: null, or one number */
};

/* Behind the bracket that closes the one at `at`. */
static const char *
end_of(const char *at)
{
    int depth = 0;
    do {
        depth += *at == '[' || *at == '{';
        depth -= *at == ']' || *at == '}';
        at++;
    } while (depth > 0 && *at);
    return at;
}

/* Behind the colon of "name":, or NULL if that is not before `end`. */
static const char *
member(const char *at, const char *end, const char *name)
{
    char word[32];
    snprintf(word, sizeof word, "\"%s\":", name);
    at = strstr(at, word);
    return at && at < end ? at + strlen(word) : NULL;
}

/* Numbers in nested brackets; count 0 where there is null or no such member. */
static struct numbers
numbers(const char *at, const char *end, const char *name)
{
    struct numbers found = {0};
    int depth = 0, items[5] = {0};
    at = member(at, end, name);
    found.x = memory(4096, sizeof *found.x);
    while (at && *at == ' ') {
        at++;
    }
    while (at && *at && !strchr("n}\"", *at)) {
        if (*at == '[') {
            items[++depth] = 0;
            found.rank = depth > found.rank ? depth : found.rank;
            at++;
        } else if (*at == ']') {
            found.shape[depth - 1] = items[depth];
            items[--depth]++;
            at++;
        } else if (strchr(" ,\n", *at)) {
            at++;
        } else {
            char *rest;
            found.x[found.count++] = strtod(at, &rest);
            items[depth]++;
            at = rest;
        }
        if (depth == 0) {
            break;
        }
    }
    return found;
}

/* ---- inputs ---------------------------------------------------------------------------------------------------- */

/* (rows, from) numbers as (rows, to), with zeros behind. */
static real *
widened(struct numbers x, int from, int to)
{
    int rows = x.count / from;
    real *wide = memory((size_t)rows * to, sizeof *wide);
    for (int i = 0; i < x.count; i++) {
        wide[i / from * to + i % from] = (real)x.x[i];
    }
    return wide;
}

/* (items, size, size): `factor` on the diagonal. */
static real *
diagonal(int items, int size, double factor)
{
    real *found = memory((size_t)items * size * size, sizeof *found);
    for (int i = 0; i < items * size; i++) {
        found[i * size + i % size] = (real)factor;
    }
    return found;
}

/* A length for each query: given so, or one for each item of the batch. */
static const int *
lengths(struct numbers lens, int batch, int n_queries)
{
    int *found = memory((size_t)batch * n_queries, sizeof *found);
    for (int i = 0; i < batch * n_queries; i++) {
        found[i] = lens.count ? (int)lens.x[lens.rank == 1 ? i / n_queries : i] : 0;
    }
    return lens.count ? found : NULL;
}

/* One case of vectors.json as a call of multi-head attention; kinds without heads are one head with W that change
 * nothing but the scale. */
static void
add_case(const char *kind, int number, const char *at, const char *end)
{
    int softmax = !strcmp(kind, "masked_softmax"), whole = !strcmp(kind, "multi_head");
    struct numbers q = numbers(at, end, softmax ? "X" : "queries"), k = numbers(at, end, "keys");
    struct numbers v = numbers(at, end, "values"), output = numbers(at, end, "output");
    int n_keys = softmax ? q.shape[2] : k.shape[1], d = q.shape[2], d_v = softmax ? d : v.shape[2];
    int size = d > d_v ? d : d_v;
    struct test *test = &tests[n_tests++];
    struct attention *a = &test->a;
    snprintf(test->name, sizeof test->name, "%s %d of vectors.json", kind, number);
    *a = (struct attention){.batch = q.shape[0], .n_queries = q.shape[1], .n_keys = n_keys, .num_hiddens = size};
    a->num_heads = whole ? (int)numbers(at, end, "num_heads").x[0] : 1;
    a->queries = widened(q, d, size);
    a->keys = softmax ? diagonal(a->batch, size, 1) : widened(k, d, size);
    a->values = softmax ? diagonal(a->batch, size, 1) : widened(v, d_v, size);
    a->valid_lens = lengths(numbers(at, end, "valid_lens"), a->batch, a->n_queries);
    double scale = softmax ? sqrt(size) : sqrt((double)size / d);
    const char *names[] = {"W_q", "W_k", "W_v", "W_o"};
    const real **places[] = {&a->W_q, &a->W_k, &a->W_v, &a->W_o};
    for (int i = 0; i < 4; i++) {
        *places[i] = whole ? widened(numbers(at, end, names[i]), size, size) : diagonal(1, size, i == 0 ? scale : 1);
    }
    test->expected = output.x;
    test->step = softmax ? 4 : 6;
    test->width = softmax ? n_keys : size;
    test->given = softmax ? n_keys : d_v;
}

static void
add_vectors(const char *text, const char *kind)
{
    const char *at = member(text, text + strlen(text), kind);
    if (!at) {
        fprintf(stderr, "vectors.json has no %s\n", kind);
        exit(3);
    }
    const char *end = end_of(strchr(at, '['));
    at = strchr(at, '[') + 1;
    for (int number = 1; (at = strchr(at, '{')) && at < end; number++) {
        add_case(kind, number, at, end_of(at));
        at = end_of(at);
    }
}

static real *
drawn(int count, double factor)
{
    static unsigned state = 20;
    real *found = memory(count, sizeof *found);
    for (int i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        found[i] = (real)(factor * ((state >> 8) / 8388608.0 - 1));
    }
    return found;
}

/* What vectors.json does not have: sizes that all differ, with scores in the thousands, or with no key to be seen. */
static void
add_own(const char *name, double factor, int longest)
{
    struct test *test = &tests[n_tests++];
    struct attention *a = &test->a;
    *a = (struct attention){.batch = 2, .n_queries = 3, .n_keys = 5, .num_hiddens = 12, .num_heads = 3};
    snprintf(test->name, sizeof test->name, "%s", name);
    int *lens = memory(6, sizeof *lens);
    for (int i = 0; i < 6; i++) {
        lens[i] = longest ? 1 + (i * 2 + 1) % longest : 0;
    }
    a->valid_lens = lens;
    a->queries = drawn(2 * 3 * 12, factor), a->keys = drawn(2 * 5 * 12, 1), a->values = drawn(2 * 5 * 12, 1);
    a->W_q = drawn(12 * 12, 1), a->W_k = drawn(12 * 12, 1);
    a->W_v = drawn(12 * 12, 1), a->W_o = drawn(12 * 12, 1);
}

/* ---- two calls, and what differs ------------------------------------------------------------------------------- */

static int
count_of(const struct attention *a, int step)
{
    int rows = a->batch * (step == 1 || step == 2 ? a->n_keys : a->n_queries);
    return rows * (step == 3 || step == 4 ? a->num_heads * a->n_keys : a->num_hiddens);
}

static void
call(void (*function)(const struct attention *), struct test *test, real **results)
{
    for (int step = 0; step < N_STEPS; step++) {
        int count = count_of(&test->a, step);
        results[step] = memory(count, sizeof(real));
        for (int i = 0; i < count; i++) {
            results[step][i] = UNTOUCHED;
        }
    }
    struct attention a = test->a;
    a.q = results[0], a.k = results[1], a.v = results[2], a.scores = results[3], a.weights = results[4];
    a.context = results[5], a.output = results[6];
    function(&a);
}

static int
is_written(const struct test *test, int step)
{
    for (int i = 0; i < count_of(&test->a, step); i++) {
        if (test->mine[step][i] != UNTOUCHED) {
            return 1;
        }
    }
    return 0;
}

/* Whether the key of this score is hidden: whether the mask is there already is up to the file. */
static int
is_hidden(const struct attention *a, int step, int at)
{
    int row = at / a->n_keys % a->n_queries, item = at / a->n_keys / a->n_queries / a->num_heads;
    return step == 3 && a->valid_lens && at % a->n_keys >= a->valid_lens[item * a->n_queries + row];
}

/* The first number that differs by more than `bound`, relative to the largest of its step; -1: none. */
static int
first_difference(const struct test *test, int step, double bound)
{
    double largest = 1;
    int count = count_of(&test->a, step);
    for (int i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)test->book[step][i]));
    }
    for (int i = 0; i < count; i++) {
        double error = fabs((double)test->mine[step][i] - test->book[step][i]);
        if (!(error <= bound * largest) && !is_hidden(&test->a, step, i)) {
            return i;
        }
    }
    return -1;
}

/* The factor between all numbers of a step, or 0. */
static double
factor(const struct test *test, int step)
{
    double found = 0;
    for (int i = 0; i < count_of(&test->a, step); i++) {
        double right = test->book[step][i], ratio = test->mine[step][i] / right;
        if (fabs(right) > 1e-3 && !is_hidden(&test->a, step, i)) {
            if (found != 0 && !(fabs(ratio - found) <= 1e-3 * fabs(found))) {
                return 0;
            }
            found = ratio;
        }
    }
    return isfinite(found) ? found : 0;
}

/* What all numbers of a step have in common, or the weights of this query. */
static void
hint(const struct test *test, int step, const real *weights)
{
    double each = factor(test, step), sum = 0;
    if (each != 0 && fabs(each - 1) > 1e-3) {
        printf("            Each number is %.5g times the right one.\n", each);
    } else if (first_difference(test, step, FLOAT_BOUND) < 0) {
        printf("            It is right to the digits of float: where is a float, or expf, instead of real and exp?\n");
    }
    for (int j = 0; step == 4 && j < test->a.n_keys; j++) {
        sum += weights[j];
    }
    if (step == 4 && !(fabs(sum - 1) < 1e-3)) {
        printf("            The weights of this query add up to %.5g, not to 1.\n", sum);
    }
}

static void
explain(const struct test *test, int step, int at)
{
    const struct attention *a = &test->a;
    int columns = step == 3 || step == 4 ? a->n_keys : a->num_hiddens;
    int rows = step == 1 || step == 2 ? a->n_keys : a->n_queries, row = at / columns % rows;
    printf("            %s\n            See %s: %s[", STEPS[step].is, test->name, STEPS[step].name);
    if (step == 3 || step == 4) {
        int head = at / columns / rows;
        printf("batch %d, head %d, query %d, key %d", head / a->num_heads, head % a->num_heads, row, at % columns);
    } else {
        const char *of = step == 1 || step == 2 ? "key" : "query";
        printf("batch %d, %s %d, column %d", at / columns / rows, of, row, at % columns);
    }
    int digits = sizeof(real) == 4 ? 7 : 13;
    double is = test->mine[step][at], should_be = test->book[step][at];
    printf("] is %.*g, should be %.*g.\n", digits, is, digits, should_be);
    if (test->mine[step][at] == UNTOUCHED) {
        printf("            It was not written.\n");
    } else {
        hint(test, step, test->mine[step] + at / columns * columns);
    }
    if (step == 4 && a->valid_lens) {
        int query = at / columns / rows / a->num_heads * rows + row;
        printf("            This query may see %d of %d keys.\n", a->valid_lens[query], a->n_keys);
    }
}

/* The first call that differs by what can be seen, else by anything; the number is put where `at` points to. */
static const struct test *
example(int step, int *at)
{
    double bounds[] = {1e-2, BOUND};
    for (int i = 0; i < 2 * n_tests; i++) {
        const struct test *test = &tests[i % n_tests];
        *at = first_difference(test, step, bounds[i / n_tests]);
        if (*at >= 0) {
            return test;
        }
    }
    return NULL;
}

/* A line for each step; returns the first that differs, or N_STEPS. */
static int
report(void)
{
    int wrong = N_STEPS;
    for (int step = 0; step < N_STEPS; step++) {
        int n_written = 0, n_wrong = 0, at = 0;
        for (int i = 0; i < n_tests; i++) {
            n_written += is_written(&tests[i], step);
            n_wrong += first_difference(&tests[i], step, BOUND) >= 0;
        }
        if (!n_written && step < N_STEPS - 1) {
            printf("  %-9s not written, so not compared\n", STEPS[step].name);
        } else if (!n_wrong) {
            printf("  %-9s right\n", STEPS[step].name);
        } else if (wrong < N_STEPS) {
            printf("  %-9s differs too; it comes after %s\n", STEPS[step].name, STEPS[wrong].name);
        } else {
            wrong = step;
            printf("  %-9s DIFFERS in %d of %d calls\n", STEPS[step].name, n_wrong, n_tests);
            const struct test *test = example(step, &at);
            explain(test, step, at);
        }
    }
    return wrong;
}

/* The book's own results are those of vectors.json, or this program is wrong itself. */
static void
hold_the_book_to_its_vectors(void)
{
    for (int i = 0; i < n_tests; i++) {
        struct test *test = &tests[i];
        for (int j = 0; test->expected && j < count_of(&test->a, test->step) / test->width * test->given; j++) {
            double got = test->book[test->step][j / test->given * test->width + j % test->given];
            if (!(fabs(got - test->expected[j]) <= BOUND * fmax(1, fabs(test->expected[j])))) {
                fprintf(stderr, "%s: attention.c gives %.17g for %.17g\n", test->name, got, test->expected[j]);
                exit(3);
            }
        }
    }
}

int
main(int n_words, char **words)
{
    FILE *file = n_words == 2 ? fopen(words[1], "rb") : NULL;
    if (!file) {
        fprintf(stderr, "usage: %s vectors.json, a file that can be read\n", words[0]);
        return 3;
    }
    char *text = memory(1 << 20, 1);
    size_t count = fread(text, 1, (1 << 20) - 1, file);
    fclose(file);
    text[count] = 0;
    const char *kinds[] = {"multi_head", "dot_product", "masked_softmax"};
    for (int i = 0; i < 3; i++) {
        add_vectors(text, kinds[i]);
    }
    add_own("a call whose sizes all differ", 1, 5);
    add_own("a call with scores in the thousands", 2000, 5);
    add_own("a call whose queries see no key", 1, 0);
    for (int i = 0; i < n_tests; i++) {
        call(book_attention, &tests[i], tests[i].book);
    }
    hold_the_book_to_its_vectors();
    for (int i = 0; i < n_tests; i++) {
        call(multi_head_attention, &tests[i], tests[i].mine);
    }
    printf("%s, %d calls\n", sizeof(real) == 4 ? "float" : "double", n_tests);
    return report() < N_STEPS;
}
