// SPDX-License-Identifier: Apache-2.0
// The arithmetic of every algorithm.
//
// Included once per target, after params.h, so in the target's namespace.
#include "adam.h"
#include "ademamix.h"
#include "lion.h"
#include "sgd.h"
