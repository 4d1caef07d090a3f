// Every CPU kernel, for one instruction set. The includer is inside that set's namespace.
#include "vec.h"
#include "rows.h"
#include "recurrent.h"
#include "gates.h"
#include "conv_update.h"
#include "conv.h"
#include "conv_gating.h"
#include "norm.h"
#include "decode.h"
#include "sweep.h"
#include "window_entries.h"
#include "window_base.h"
#include "windows.h"
#include "tiles.h"
#include "chunk_products.h"
#include "strips.h"
#include "chunk.h"
#include "chunk_lowrank.h"
#include "chunk_backward.h"
#include "linear.h"

#define GDN_STRINGIFY_(x) #x
#define GDN_STRINGIFY(x) GDN_STRINGIFY_(x)

extern const Kernels table;
const Kernels table = {
    GDN_STRINGIFY(GDN_ISA),
    GDN_ISA_DESCRIPTION,
    supported,
    recurrent,
    gating,
    short_conv,
    conv_gating,
    gated_rms_norm,
    decode,
    sweep,
    recurrent_window,
    window_flush,
    decode_window,
    chunk,
    chunk_lowrank,
    chunk_backward,
    linear,
    GDN_LINEAR_LIMIT,
};
