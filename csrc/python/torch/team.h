/*
 * team.h: what team.c asks of bound.c.
 */
#ifndef MHA_PY_TEAM_H
#define MHA_PY_TEAM_H

/* The functions that the loaded library whose file name begins so calls by these names; NULL for what is not bound. */
void mha_py_bound(const char *library, const char *const *names, void **found, int n);

#endif
