// Numbers of a model and floats.
#pragma once

#include <string.h>

#include "kernels.h"

static inline float half_as_float(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float as_float(number x) {
#ifdef KVBOOST_FLOAT32
    return x;
#else
    return half_as_float(x);
#endif
}

static inline number as_number(float x) {
#ifdef KVBOOST_FLOAT32
    return x;
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (number)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); // to nearest, ties to even
#endif
}
