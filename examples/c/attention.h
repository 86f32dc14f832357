/* Multi-head attention as one call on plain arrays, stored row by row.  docs/attention-in-c.md explains it. */
#ifndef ATTENTION_H
#define ATTENTION_H

#ifndef REAL
#define REAL float /* cc -DREAL=double: the same in double */
#endif
typedef REAL real;

struct attention {
    int batch, n_queries, n_keys, num_hiddens, num_heads;

    /* Given.  Rows of queries, keys and values have num_hiddens numbers; the W are (num_hiddens, num_hiddens). */
    const real *queries, *keys, *values; /* (batch, n_queries, .), (batch, n_keys, .), (batch, n_keys, .) */
    const int *valid_lens;               /* (batch, n_queries): how many keys each query may see; NULL: all */
    const real *W_q, *W_k, *W_v, *W_o;

    /* To be written: each step's result. */
    real *q, *k, *v;        /* like queries, keys, values: head h has the columns h*d to h*d + d-1 of each row */
    real *scores, *weights; /* (batch, num_heads, n_queries, n_keys) */
    real *context;          /* (batch, n_queries, num_hiddens): the heads beside each other again */
    real *output;           /* (batch, n_queries, num_hiddens) */
};

void multi_head_attention(const struct attention *a);

#endif
