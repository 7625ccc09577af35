/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What processes do on GPUs, seen from their calls of libcudart, libcuda and libnccl, added up here: the reader takes sums
 * once a round, and no call makes an event. What a function is, its cookie says (cuda.h), so that one program serves all
 * functions of a kind; sources/cuda_probe/ knows the functions.
 */
#include "gf.h"
#include "cuda_nccl.h"
#include "cuda_life.h"
