"""More enumerations of `transformer_engine_torch`: of attention and overlapped communication.

Nothing here reads them; scripts name them, and compare and print what they have named.
"""

from __future__ import annotations

import enum

from quaver.integrations.transformer_engine.options import transformer_engine_name

_torch = transformer_engine_name("transformer_engine_torch")


@_torch
class NVTE_Bias_Type(enum.IntEnum):  # noqa: N801 - the name that scripts use
    """Where attention adds a bias."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


@_torch
class NVTE_Mask_Type(enum.IntEnum):  # noqa: N801 - the name that scripts use
    """What attention masks."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


@_torch
class NVTE_Softmax_Type(enum.IntEnum):  # noqa: N801 - the name that scripts use
    """What a softmax's denominator has beside the scores."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


@_torch
class NVTE_QKV_Format(enum.IntEnum):  # noqa: N801 - the name that scripts use
    """The order of the dimensions; after the 2, that of key and value where it is another."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6


@_torch
class NVTE_QKV_Layout(enum.IntEnum):  # noqa: N801 - the name that scripts use
    """How query, key and value lie in memory; a 3 or 2 is that of interleaved ones."""

    NVTE_SB3HD = 0
    NVTE_SBH3D = 1
    NVTE_SBHD_SB2HD = 2
    NVTE_SBHD_SBH2D = 3
    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BS3HD = 5
    NVTE_BSH3D = 6
    NVTE_BSHD_BS2HD = 7
    NVTE_BSHD_BSH2D = 8
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_TH3D = 11
    NVTE_THD_T2HD = 12
    NVTE_THD_TH2D = 13
    NVTE_THD_THD_THD = 14
    NVTE_SBHD_BSHD_BSHD = 15
    NVTE_BSHD_SBHD_SBHD = 16
    NVTE_THD_BSHD_BSHD = 17
    NVTE_THD_SBHD_SBHD = 18
    NVTE_Paged_KV_BSHD_BSHD_BSHD = 19
    NVTE_Paged_KV_BSHD_SBHD_SBHD = 20
    NVTE_Paged_KV_SBHD_BSHD_BSHD = 21
    NVTE_Paged_KV_SBHD_SBHD_SBHD = 22
    NVTE_Paged_KV_THD_BSHD_BSHD = 23
    NVTE_Paged_KV_THD_SBHD_SBHD = 24


@_torch
class NVTE_Fused_Attn_Backend(enum.IntEnum):  # noqa: N801 - the name that scripts use
    """A fused attention."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


@_torch
class CommOverlapType(enum.IntEnum):
    """A collective that can be overlapped."""

    RS = 0
    AG = 1


@_torch
class CommOverlapAlgo(enum.IntEnum):
    """How a collective is overlapped."""

    BULK_OVERLAP_AG = 0
    BULK_OVERLAP_RS = 1
    SPLIT_PIPELINED_AG_P2P = 2
    SPLIT_PIPELINED_RS = 3
    SPLIT_PIPELINED_RS_P2P = 4
    ATOMIC_GEMM_RS = 5
    ATOMIC_GEMM_AG_P2P = 6
    ATOMIC_GEMM_RS_P2P = 7


ENUMERATIONS: tuple[type[enum.IntEnum], ...] = (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Fused_Attn_Backend,
    CommOverlapType,
    CommOverlapAlgo,
)
