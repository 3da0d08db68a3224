"""The kernels in Triton. Imported by the compiler's process and by Triton's interpreter only: importing it imports triton.

Parameters have the names of `params.Call`; addresses come as 64-bit integers, in capitals are constants. Grids have
one dimension. Arithmetic is the sibling's: activations rounded to E4M3 by integer operations, codes and scales decoded
in registers, sums in fp32. Dots take bfloat16, which holds an E4M3 or a bf16 activation with its scale, and a code with
its scale, exactly; an fp32 activation takes three (PLANES). Dots sum CHUNK columns, chunks are added in order of K.

Prepared activations, x [T] and what goes into w2 [pairs]: [row][plane][part][K / PARTS] bfloat16 bits, where channel c
is number c // PARTS of part c % PARTS: codes of one part of neighbouring bytes or words meet neighbours.
"""

import triton
import triton.language as tl

WIDE_CHUNK = tl.constexpr(256)
"""Columns of a step over K for one token."""
ENTRIES = tl.constexpr(1024)
"""Entries of ids, or scale bytes, looked at together."""
NOWHERE = tl.constexpr(0x7FFFFFFF)
CODE_SCALE = tl.constexpr(16384.0)
"""A code moved into the exponent and mantissa of an fp16 is its value x 2^-14."""


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """For addresses that are multiples of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _tensors(rows, expert, number: tl.constexpr):
    """Codes and scales of w1 (number 0), w3 (1) or w2 (2) of an expert of the call."""
    table = _pointer(rows, tl.int64) + expert * 6 + number * 2
    return _pointer(tl.load(table), tl.uint8), _pointer(tl.load(table + 1), tl.uint8)


@triton.jit
def _masked(mask, flag):
    """The mask where `flag` is 1, nothing where it is 0. (A boolean scalar is no boolean to Triton's interpreter.)"""
    return mask.to(tl.int32) * flag != 0


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(x):
    """Nearest, ties to even; what is not finite stays so."""
    bits = _bits(x)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FFF, nearest).to(tl.uint16)


@triton.jit
def _widened(bits16):
    """bfloat16 bits -> fp32."""
    return _float(bits16.to(tl.uint32) << 16)


@triton.jit
def _rounded(x, BFLOAT16: tl.constexpr):
    """The value an operation hands on."""
    if BFLOAT16:
        return _widened(_bf16_bits(x))
    else:
        return x


@triton.jit
def _load(pointer, mask, BFLOAT16: tl.constexpr):
    """Activations as they lie in memory -> fp32, 0 where masked."""
    value = tl.load(pointer, mask=mask, other=0)
    if BFLOAT16:
        return _widened(value)
    else:
        return value


@triton.jit
def _store(pointer, x, mask, BFLOAT16: tl.constexpr):
    if BFLOAT16:
        tl.store(pointer, _bf16_bits(x), mask=mask)
    else:
        tl.store(pointer, x, mask=mask)


@triton.jit
def _activations(address, BFLOAT16: tl.constexpr):
    if BFLOAT16:
        return _pointer(address, tl.uint16)
    else:
        return _pointer(address, tl.float32)


@triton.jit
def _report(status, finite):
    """`finite` int32, any shape: 1 where a sum is finite."""
    tl.store(_pointer(status, tl.int32), 1, mask=tl.min(tl.ravel(finite), axis=0) == 0)


@triton.jit
def _is_finite(x):
    return ((_bits(x) & 0x7F800000) != 0x7F800000).to(tl.int32)


@triton.jit
def _e8m0(byte):
    """2^(b - 127), b = 0 included; b = 255 is infinite and shows in every sum it touches."""
    return _float(tl.maximum(byte.to(tl.uint32) << 23, 0x00400000))


@triton.jit
def _code(bits):
    """Four bits -> the code's value x 1 / CODE_SCALE, fp32."""
    half = ((bits & 8) << 12) | ((bits & 7) << 9)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _quantised(groups, AXIS: tl.constexpr):
    """Rounds fp32 groups of 32 along AXIS to E4M3 with a power-of-two scale (spec 3.2); NaN stays NaN."""
    peak = tl.maximum(tl.max(tl.abs(groups), axis=AXIS, keep_dims=True), 1e-4)
    bits = _bits(peak * (1.0 / 448.0))
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
    y = groups * _float((254 - exponent) << 23)
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    bits = _bits(y)
    normal = _float((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000)
    subnormal = (y + 24576.0) - 24576.0  # 1.5 x 2^14: the spacing of its neighbours is 2^-9
    rounded = tl.where((bits & 0x7FFFFFFF) < 0x3C800000, subnormal, normal)
    return tl.where(y != y, y, rounded) * _float(exponent << 23)


@triton.jit
def _store_planes(pointer, x, mask, PLANES: tl.constexpr, STRIDE: tl.constexpr):
    """x = plane 0 + plane 1 + ..., each a bfloat16: what is cut off one goes to the next."""
    for plane in tl.static_range(PLANES):
        bits = _bits(x) & 0xFFFF0000
        bits = tl.where(x != x, 0x7FC00000, bits)
        tl.store(pointer + plane * STRIDE, (bits >> 16).to(tl.uint16), mask=mask)
        x = x - _float(bits)


@triton.jit
def _exp(x):
    """e^x, also where |x| is large: what x log2(e) loses in fp32 is multiplied in."""
    high = x * 1.4426950408889634
    low = tl.fma(x, 1.4426950408889634, -high) + x * 1.925963033500e-08
    return tl.exp2(high) * (1.0 + low * 0.6931471805599453)


@triton.jit
def _swiglu(gate, up, route, LIMIT: tl.constexpr, BFLOAT16: tl.constexpr):
    """Of two sums, with the route weight in front of w2 (spec 3.9)."""
    gate, up = tl.minimum(_rounded(gate, BFLOAT16), LIMIT), _rounded(up, BFLOAT16)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return tl.math.div_rn(gate, 1.0 + _exp(-gate)) * up * route


@triton.jit
def count_tokens(ids, experts, counts, tokens, TOP_K: tl.constexpr):
    """counts [n]: entries of ids [T, K] that chose the program's expert."""
    expert, entries = tl.program_id(0), tokens * TOP_K
    mine = tl.load(experts.to(tl.pointer_type(tl.int32)) + expert)
    found = tl.zeros((ENTRIES,), tl.int32)
    for begin in range(0, entries, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        found += (tl.load(_pointer(ids, tl.int32) + entry, mask=entry < entries, other=-1) == mine).to(tl.int32)
    tl.store(_pointer(counts, tl.int32) + expert, tl.sum(found))


@triton.jit
def place_tokens(ids, experts, counts, pairs, place_of, tokens, num_experts, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """pairs: the entries of each expert, ascending, experts in turn; place_of [T, K]: their inverse, -1 left elsewhere."""
    expert, entries = tl.program_id(0), tokens * TOP_K
    mine = tl.load(experts.to(tl.pointer_type(tl.int32)) + expert)
    other = tl.arange(0, EXPERTS)
    at = tl.sum(tl.load(_pointer(counts, tl.int32) + other, mask=other < tl.minimum(expert, num_experts), other=0))
    for begin in range(0, entries, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        chosen = tl.load(_pointer(ids, tl.int32) + entry, mask=entry < entries, other=-1) == mine
        place = at + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(_pointer(pairs, tl.int32) + place, entry, mask=chosen)
        tl.store(_pointer(place_of, tl.int32) + entry, place, mask=chosen)
        at += tl.sum(chosen.to(tl.int32))


@triton.jit
def prepare_x(
    x, x_prepared, tokens, HIDDEN: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, REFERENCE: tl.constexpr,
    BFLOAT16: tl.constexpr,
):  # fmt: skip
    """x [T, H] -> prepared. A program takes 32 groups of one token."""
    blocks: tl.constexpr = tl.cdiv(HIDDEN, 1024)
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel = block * 1024 + tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = channel < HIDDEN
    value = _load(_activations(x, BFLOAT16) + token.to(tl.int64) * HIDDEN + channel, inside, BFLOAT16)
    if REFERENCE:
        value = _quantised(value, 1)
    to = _pointer(x_prepared, tl.uint16) + token.to(tl.int64) * (PLANES * HIDDEN)
    _store_planes(to + channel % PARTS * (HIDDEN // PARTS) + channel // PARTS, value, inside, PLANES, HIDDEN)


@triton.jit
def _words_dot(codes, scales, x, rows, valid, K: tl.constexpr, PLANES: tl.constexpr):
    """[N] sums over K of `rows` of one matrix with one prepared activation of 8 parts, for one token."""
    group = tl.arange(0, WIDE_CHUNK // 32)
    word = tl.arange(0, 4)
    sums = tl.zeros((rows.shape[0], WIDE_CHUNK // 32, 4), tl.float32)
    words = codes.to(tl.pointer_type(tl.uint32)) + rows.to(tl.int64)[:, None, None] * (K // 8)
    bytes_ = scales + rows.to(tl.int64)[:, None] * (K // 32)
    for begin in range(0, K // 32, WIDE_CHUNK // 32):
        inside = begin + group < K // 32
        at = (begin + group)[:, None] * 4 + word[None, :]
        packed = tl.load(words + at[None, :, :], mask=valid[:, None, None] & inside[None, :, None], other=0)
        scale = _e8m0(tl.load(bytes_ + (begin + group)[None, :], mask=valid[:, None] & inside[None, :], other=127))
        step = tl.zeros_like(sums)
        for part in tl.static_range(8):
            activation = tl.zeros((WIDE_CHUNK // 32, 4), tl.float32)
            for plane in tl.static_range(PLANES):
                from_ = x + (PLANES - 1 - plane) * K
                activation += _widened(tl.load(from_ + part * (K // 8) + at, mask=inside[:, None], other=0))
            step += _code((packed >> (4 * part)) & 15) * activation[None, :, :]
        sums += (step * CODE_SCALE) * scale[:, :, None]
    return tl.sum(tl.sum(sums, axis=2), axis=1)


@triton.jit
def _drawn(ids, experts, expert, TOP_K: tl.constexpr, DRAWS: tl.constexpr):
    """Which of the one token's draws is the call's expert number `expert`: [DRAWS] booleans."""
    draw = tl.arange(0, DRAWS)
    id_ = tl.load(_pointer(ids, tl.int32) + draw, mask=draw < TOP_K, other=-1)
    return id_ == tl.load(experts.to(tl.pointer_type(tl.int32)) + expert)


@triton.jit
def moe_single_token_up(
    ids, weights, experts, rows, status, x_prepared, act_prepared, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    LIMIT: tl.constexpr, TOP_K: tl.constexpr, DRAWS: tl.constexpr, PLANES: tl.constexpr, REFERENCE: tl.constexpr,
    BFLOAT16: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One token through w1 and w3: what goes into w2, prepared, [n]. A program takes ROWS channels of one expert."""
    blocks: tl.constexpr = tl.cdiv(INTERMEDIATE, ROWS)
    expert = tl.program_id(0) // blocks
    drawn = _drawn(ids, experts, expert, TOP_K, DRAWS)
    if tl.max(drawn.to(tl.int32)) == 0:
        return
    draw = tl.arange(0, DRAWS)
    route = tl.sum(tl.load(_pointer(weights, tl.float32) + draw, mask=drawn, other=0))
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    valid = row < INTERMEDIATE
    x = _pointer(x_prepared, tl.uint16)
    codes, scales = _tensors(rows, expert, 0)
    gate = _words_dot(codes, scales, x, row, valid, HIDDEN, PLANES)
    codes, scales = _tensors(rows, expert, 1)
    up = _words_dot(codes, scales, x, row, valid, HIDDEN, PLANES)
    _report(status, tl.minimum(_is_finite(gate), _is_finite(up)))
    act = _rounded(_swiglu(gate, up, route, LIMIT, BFLOAT16), BFLOAT16)
    if REFERENCE:
        act = tl.reshape(_quantised(tl.reshape(act, (ROWS // 32, 32)), 1), (ROWS,))
    to = _pointer(act_prepared, tl.uint16) + expert * (PLANES * INTERMEDIATE) + row % 8 * (INTERMEDIATE // 8) + row // 8
    _store_planes(to, act, valid, PLANES, INTERMEDIATE)


@triton.jit
def moe_single_token_down(
    ids, experts, rows, out, status, act_prepared, num_experts, exact, accumulate, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    TOP_K: tl.constexpr, DRAWS: tl.constexpr, PLANES: tl.constexpr, BFLOAT16: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One token through w2 of all its experts here. A program takes ROWS channels of the output."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < HIDDEN
    partial = _pointer(out, tl.float32) + row
    total = tl.load(partial, mask=_masked(valid, accumulate * (1 - exact)), other=0)
    place = 0
    for expert in range(num_experts):
        if tl.max(_drawn(ids, experts, expert, TOP_K, DRAWS).to(tl.int32)) != 0:
            codes, scales = _tensors(rows, expert, 2)
            x = _pointer(act_prepared, tl.uint16) + expert * (PLANES * INTERMEDIATE)
            y = _words_dot(codes, scales, x, row, valid, INTERMEDIATE, PLANES)
            _report(status, _is_finite(y))
            _store(_activations(out, BFLOAT16) + place * HIDDEN + row, y, _masked(valid, exact), BFLOAT16)
            total += _rounded(y, BFLOAT16)
            place += 1
    tl.store(partial, total, mask=_masked(valid, 1 - exact))


@triton.jit
def _tile(counts, num_experts, tile, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first of its pairs, how many from there on) of a token tile; the number is 0 past the last tile."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(_pointer(counts, tl.int32) + expert, mask=expert < num_experts, other=0)
    ends = tl.cumsum((count + (TOKENS - 1)) // TOKENS, axis=0)
    found = tl.sum((ends <= tile).to(tl.int32))
    before = tl.max(tl.where(ends <= tile, ends, 0))
    first = (tile - before) * TOKENS
    pair = tl.sum(tl.where(expert < found, count, 0)) + first
    left = tl.sum(tl.where(expert == found, count, 0)) - first
    return found, pair, tl.maximum(left, 0)


@triton.jit
def _operand(x, TENSOR_CORES: tl.constexpr):
    """fp32 that a bfloat16 holds, as a dot wants it."""
    if TENSOR_CORES:
        return (_bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x


@triton.jit
def _bytes_dot(packed, scale, x, at, mask, K: tl.constexpr, PLANES: tl.constexpr, CHUNK: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """[M, N] sums over one chunk of G groups: packed [M, G, 16] bytes, scale [M, G] fp32, x [1, N] pointers to rows of 2 parts."""
    factor = scale[:, :, None]
    low = _code(packed.to(tl.uint32) & 15) * CODE_SCALE * factor
    high = _code(packed.to(tl.uint32) >> 4) * CODE_SCALE * factor
    M: tl.constexpr = packed.shape[0]
    low = _operand(tl.reshape(low, (M, CHUNK // 2)), TENSOR_CORES)
    high = _operand(tl.reshape(high, (M, CHUNK // 2)), TENSOR_CORES)
    sums = tl.zeros((M, x.shape[1]), tl.float32)
    for plane in tl.static_range(PLANES):
        from_ = x + (PLANES - 1 - plane) * K + at[:, None]
        even = _operand(_widened(tl.load(from_, mask=mask, other=0)), TENSOR_CORES)
        odd = _operand(_widened(tl.load(from_ + K // 2, mask=mask, other=0)), TENSOR_CORES)
        sums = tl.dot(low, even, sums, input_precision="ieee")
        sums = tl.dot(high, odd, sums, input_precision="ieee")
    return sums


@triton.jit
def moe_multi_token_up(
    weights, rows, status, x_prepared, act_prepared, counts, pairs, num_experts, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    LIMIT: tl.constexpr, TOP_K: tl.constexpr, PLANES: tl.constexpr, REFERENCE: tl.constexpr, BFLOAT16: tl.constexpr,
    TENSOR_CORES: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Pairs through w1 and w3: what goes into w2, prepared. A program takes ROWS channels of TOKENS pairs of one expert."""
    blocks: tl.constexpr = tl.cdiv(INTERMEDIATE, ROWS)
    expert, pair, left = _tile(counts, num_experts, tl.program_id(0) // blocks, TOKENS, EXPERTS)
    if left == 0:
        return
    token = tl.arange(0, TOKENS)
    entry = tl.load(_pointer(pairs, tl.int32) + pair + token, mask=token < left, other=0)
    route = tl.load(_pointer(weights, tl.float32) + entry, mask=token < left, other=0)
    x = _pointer(x_prepared, tl.uint16) + (entry // TOP_K).to(tl.int64)[None, :] * (PLANES * HIDDEN)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    valid = row < INTERMEDIATE
    start = row.to(tl.int64)
    codes, scales = _tensors(rows, expert, 0)
    gate_codes, gate_scales = codes + start[:, None, None] * (HIDDEN // 2), scales + start[:, None] * (HIDDEN // 32)
    codes, scales = _tensors(rows, expert, 1)
    up_codes, up_scales = codes + start[:, None, None] * (HIDDEN // 2), scales + start[:, None] * (HIDDEN // 32)
    group = tl.arange(0, CHUNK // 32)
    column = tl.arange(0, CHUNK // 2)
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    for begin in range(0, HIDDEN // 32, CHUNK // 32):
        inside = begin + group < HIDDEN // 32
        whole = valid[:, None] & inside[None, :]
        at = (begin + group)[:, None] * 16 + tl.arange(0, 16)[None, :]
        scale = _e8m0(tl.load(gate_scales + (begin + group)[None, :], mask=whole, other=127))
        packed = tl.load(gate_codes + at[None, :, :], mask=whole[:, :, None], other=0)
        half = begin * 16 + column
        mask = (half < HIDDEN // 2)[:, None] & (token < left)[None, :]
        gate += _bytes_dot(packed, scale, x, half, mask, HIDDEN, PLANES, CHUNK, TENSOR_CORES)
        scale = _e8m0(tl.load(up_scales + (begin + group)[None, :], mask=whole, other=127))
        packed = tl.load(up_codes + at[None, :, :], mask=whole[:, :, None], other=0)
        up += _bytes_dot(packed, scale, x, half, mask, HIDDEN, PLANES, CHUNK, TENSOR_CORES)
    _report(status, tl.minimum(_is_finite(gate), _is_finite(up)))
    act = _rounded(_swiglu(gate, up, route[None, :], LIMIT, BFLOAT16), BFLOAT16)
    if REFERENCE:
        act = tl.reshape(_quantised(tl.reshape(act, (ROWS // 32, 32, TOKENS)), 1), (ROWS, TOKENS))
    to = _pointer(act_prepared, tl.uint16) + (pair + token).to(tl.int64)[None, :] * (PLANES * INTERMEDIATE)
    to += (row % 2 * (INTERMEDIATE // 2) + row // 2)[:, None]
    _store_planes(to, act, valid[:, None] & (token < left)[None, :], PLANES, INTERMEDIATE)


@triton.jit
def moe_multi_token_down(
    rows, status, act_prepared, y, counts, num_experts, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, PLANES: tl.constexpr,
    BFLOAT16: tl.constexpr, TENSOR_CORES: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Pairs through w2: y [pairs, H]. A program takes ROWS channels of TOKENS pairs of one expert."""
    blocks: tl.constexpr = tl.cdiv(HIDDEN, ROWS)
    expert, pair, left = _tile(counts, num_experts, tl.program_id(0) // blocks, TOKENS, EXPERTS)
    if left == 0:
        return
    token = tl.arange(0, TOKENS)
    place = (pair + token).to(tl.int64)[None, :]
    x = _pointer(act_prepared, tl.uint16) + place * (PLANES * INTERMEDIATE)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    valid = row < HIDDEN
    codes, scales = _tensors(rows, expert, 2)
    codes += row.to(tl.int64)[:, None, None] * (INTERMEDIATE // 2)
    scales += row.to(tl.int64)[:, None] * (INTERMEDIATE // 32)
    group = tl.arange(0, CHUNK // 32)
    column = tl.arange(0, CHUNK // 2)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for begin in range(0, INTERMEDIATE // 32, CHUNK // 32):
        inside = begin + group < INTERMEDIATE // 32
        whole = valid[:, None] & inside[None, :]
        at = (begin + group)[:, None] * 16 + tl.arange(0, 16)[None, :]
        scale = _e8m0(tl.load(scales + (begin + group)[None, :], mask=whole, other=127))
        packed = tl.load(codes + at[None, :, :], mask=whole[:, :, None], other=0)
        half = begin * 16 + column
        mask = (half < INTERMEDIATE // 2)[:, None] & (token < left)[None, :]
        sums += _bytes_dot(packed, scale, x, half, mask, INTERMEDIATE, PLANES, CHUNK, TENSOR_CORES)
    _report(status, _is_finite(sums))
    _store(_activations(y, BFLOAT16) + place * HIDDEN + row[:, None], sums, valid[:, None] & (token < left)[None, :], BFLOAT16)


@triton.jit
def combine_rows(
    y, out, place_of, accumulate, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, DRAWS: tl.constexpr, BFLOAT16: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """out [T, H]: the sum of a token's rows here in ascending expert id, which is the order of their places."""
    blocks: tl.constexpr = tl.cdiv(HIDDEN, CHANNELS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    draw = tl.arange(0, DRAWS)
    place = tl.load(_pointer(place_of, tl.int32) + token * TOP_K + draw, mask=draw < TOP_K, other=-1)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    valid = channel < HIDDEN
    to = _pointer(out, tl.float32) + token * HIDDEN + channel
    total = tl.load(to, mask=_masked(valid, accumulate), other=0)
    last = -1
    for _ in range(TOP_K):
        last = tl.min(tl.where(place > last, place, NOWHERE))
        present = (last != NOWHERE).to(tl.int32)
        from_ = _activations(y, BFLOAT16) + (last * present).to(tl.int64) * HIDDEN + channel
        total += _load(from_, _masked(valid, present), BFLOAT16)
    tl.store(to, total, mask=valid)


@triton.jit
def find_bad_scale(rows, found, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr):
    """found [n, 3]: the first row of w1, w3, w2 with a scale byte 255, or NOWHERE. A program takes one tensor of one expert."""
    expert, number = tl.program_id(0) // 3, tl.program_id(0) % 3
    groups = tl.where(number == 2, INTERMEDIATE // 32, HIDDEN // 32)
    size = tl.where(number == 2, HIDDEN * (INTERMEDIATE // 32), INTERMEDIATE * (HIDDEN // 32))
    scales = tl.load(_pointer(rows, tl.int64) + expert * 6 + number * 2 + 1).to(tl.pointer_type(tl.uint8))
    first = tl.full((ENTRIES,), NOWHERE, tl.int32)
    for begin in range(0, size, ENTRIES):
        at = begin + tl.arange(0, ENTRIES)
        byte = tl.load(scales + at, mask=at < size, other=0)
        first = tl.minimum(first, tl.where(byte == 255, at // groups, NOWHERE))
    tl.store(_pointer(found, tl.int32) + expert * 3 + number, tl.min(first))
