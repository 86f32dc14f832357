/* The book's multi-head attention in plain C, to be read beside docs/attention-in-c.md.  make check-c checks it. */
#include <math.h>
#include "attention.h"

/* Y = X W:  Y[r][c] = sum over i of X[r][i] W[i][c] */
static void
project(int rows, int size, const real *X, const real *W, real *Y)
{
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < size; c++) {
            real sum = 0;
            for (int i = 0; i < size; i++) {
                sum += X[r * size + i] * W[i * size + c];
            }
            Y[r * size + c] = sum;
        }
    }
}

/* a[j] = exp(s[j] - m) / (sum over all keys of exp(s - m));  a key that is hidden has the score -1000000 */
static void
masked_softmax(int n_keys, int valid_len, const real *s, real *a)
{
    real m = -INFINITY, sum = 0;
    for (int j = 0; j < n_keys; j++) {
        a[j] = j < valid_len ? s[j] : -1e6;
        m = a[j] > m ? a[j] : m;
    }
    for (int j = 0; j < n_keys; j++) {
        a[j] = exp(a[j] - m);
        sum += a[j];
    }
    for (int j = 0; j < n_keys; j++) {
        a[j] /= sum;
    }
}

/* One query of one head: s[j] = q . k[j] / sqrt(d);  a = masked_softmax(s);  c = sum over j of a[j] v[j] */
static void
attend(const struct attention *p, int valid_len, const real *q, const real *k, const real *v, real *s, real *a, real *c)
{
    int d = p->num_hiddens / p->num_heads;
    for (int j = 0; j < p->n_keys; j++) {
        real sum = 0;
        for (int i = 0; i < d; i++) {
            sum += q[i] * k[j * p->num_hiddens + i];
        }
        s[j] = sum / sqrt(d);
    }
    masked_softmax(p->n_keys, valid_len, s, a);
    for (int i = 0; i < d; i++) {
        c[i] = 0;
        for (int j = 0; j < p->n_keys; j++) {
            c[i] += a[j] * v[j * p->num_hiddens + i];
        }
    }
}

/* Y = concat(heads) W_o;  head h is attention over the columns from h*d on of X W_q, X W_k and X W_v */
void
multi_head_attention(const struct attention *p)
{
    int size = p->num_hiddens, d = size / p->num_heads;
    project(p->batch * p->n_queries, size, p->queries, p->W_q, p->q);
    project(p->batch * p->n_keys, size, p->keys, p->W_k, p->k);
    project(p->batch * p->n_keys, size, p->values, p->W_v, p->v);
    for (int b = 0; b < p->batch; b++) {
        for (int h = 0; h < p->num_heads; h++) {
            for (int i = 0; i < p->n_queries; i++) {
                int row = b * p->n_queries + i, key = b * p->n_keys * size + h * d;
                int score = ((b * p->num_heads + h) * p->n_queries + i) * p->n_keys;
                int valid_len = p->valid_lens ? p->valid_lens[row] : p->n_keys;
                attend(p, valid_len, p->q + row * size + h * d, p->k + key, p->v + key, p->scores + score,
                       p->weights + score, p->context + row * size + h * d);
            }
        }
    }
    project(p->batch * p->n_queries, size, p->context, p->W_o, p->output);
}
