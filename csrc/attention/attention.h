/*
 * attention.h: runs a job whose memory is placed: forward, or the weights alone.  (backward.h: its gradients.)
 */
#ifndef MHA_ATTENTION_H
#define MHA_ATTENTION_H

#include "job.h"

void mha_attention_run(const mha_attention_job *job);

#endif
