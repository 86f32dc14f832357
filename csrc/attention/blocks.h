/*
 * blocks.h: key blocks made ready for the tiles that meet them.
 */
#ifndef MHA_BLOCKS_H
#define MHA_BLOCKS_H

#include "walk.h"

/* Packs and copies what tiles will read of the keys and values of the walk's block, into its room. */
void mha_prepare_block(mha_walk *walk);

/* mha_walk_next for those who compute scores: a block is made ready before its first tile. */
MHA_INLINE int
mha_next_prepared(mha_walk *walk)
{
    const int is_tile = mha_walk_next(walk);

    if (is_tile && walk->is_new_block) {
        mha_prepare_block(walk);
    }
    return is_tile;
}

#endif
