"""How much work a model is: operations counted, not measured. Imports no torch."""

from vmd.config import DRAFT_EMBEDDING, ModelConfig


def forward_flops(config: ModelConfig, *, together: bool = False) -> float:
    """Operations of the matrix products of one training sequence's forward pass: useful work only.

    A product of (m, k) and (k, n) counts 2 m k n. Attention counts the pairs that see each other, twice (scores, values).
    Of a last layer the clean stream's keys and values count alone, since nothing reads the rest. Codes score every token,
    as if all were masked. `together`: a draft head scores the tokens twice (`objective.together`).
    """
    c, d, length, r, z = config, config.width, config.length, config.block_size, config.latent
    blocks = length // r
    keys_values, rest = 4 * d * d, 4 * d * d + 4 * c.mlp_ratio * d * d  # per token: k and v; q, out and MLP
    pair = 4 * d  # per pair that sees each other
    block_causal = length * (length + r) / 2  # pairs of the clean stream
    own, earlier = length * r, length * (length - r) / 2  # pairs of the noisy stream: in its block, with clean ones before

    def one_stream(layers: int, pairs: float) -> float:
        return layers * (length * (keys_values + rest) + pair * pairs)

    def two_streams(layers: int, pairs: float) -> float:
        """Over [xt ; x0], whose noisy half sees so many pairs."""
        return one_stream(layers, pairs) + one_stream(layers - 1, block_causal) + length * keys_values

    def network(layers: int) -> float:
        return two_streams(layers, own + earlier) if blocks > 1 else one_stream(layers, own)

    total = network(c.layers) + 2 * length * d * c.vocab_size
    if c.draft:
        total += draft_flops(c, 1 + together)
    if z.kind == "gaussian":
        if z.encoder_layers:
            if z.encoder_stream == "doubled":
                total += two_streams(z.encoder_layers, own + earlier + own)
            elif z.encoder_sees_mask:
                total += network(z.encoder_layers)
            else:
                total += one_stream(z.encoder_layers, block_causal)
            total += blocks * 2 * d * 2 * z.dim  # its head
        streams = 2 if blocks > 1 and z.on_clean else 1
        modulations = 1 if z.shared_modulation else c.layers
        total += streams * blocks * 2 * (modulations * 6 * d * d) + blocks * 2 * (z.dim * d + d * d + 2 * d * d)
        if z.prior == "learned":
            total += network(z.prior_layers) + blocks * 2 * d * 2 * z.dim
    if z.coded:
        chain = z.kind == "chain"
        codes = length // z.span if chain else blocks
        total += (length if z.by_place else codes) * 2 * d * z.codes  # the prior
        total += (codes - blocks) * 4 * z.codes**2  # of a chain, from a code to the next one
        times = z.codes if z.code_layers else 1
        if z.code_layers:  # the noisy stream runs through the last layers for every code, not once
            total += (z.codes - 1) * one_stream(z.code_layers, own + earlier)
            total += z.codes * (1 if z.shared_modulation else z.code_layers) * blocks * 2 * 6 * d * d  # modulations
            total += (z.codes - 1) * 2 * length * d * c.vocab_size
        if z.head == "bilinear":
            rank = z.head_dim or d
            total += times * 2 * length * d * rank + z.codes * 2 * length * rank * c.vocab_size
        elif not z.code_layers:
            total += 2 * length * c.vocab_size * z.codes
    return float(total)


def sampling_flops(config: ModelConfig, steps: int) -> float:
    """The same for one sequence that is sampled with cached keys and values, N = steps per block, z drawn once per block.

    A step runs over one block, which sees itself and the blocks before it. A finished block runs once more for its keys and
    values, except for the last.
    """
    c, d, r, z = config, config.width, config.block_size, config.latent
    blocks = config.length // r
    keys_values, rest = 4 * d * d, 4 * d * d + 4 * c.mlp_ratio * d * d
    seen = r * r * blocks * (blocks + 1) / 2  # pairs of one pass over every block
    seen_by_finished = r * r * blocks * (blocks - 1) / 2

    def network(layers: int, passes: int) -> float:
        noisy = layers * (config.length * (keys_values + rest) + 4 * d * seen)
        finished = (layers - 1) * ((blocks - 1) * r * (keys_values + rest) + 4 * d * seen_by_finished)
        return passes * noisy + (finished + (blocks - 1) * r * keys_values if blocks > 1 else 0)

    total = network(c.layers, steps) + steps * 2 * config.length * d * c.vocab_size
    if c.draft:  # every step scores all places, and every token is written once
        total += (steps + 1) * draft_flops(c)
    if z.kind == "gaussian":
        modulations = 1 if z.shared_modulation else c.layers
        total += blocks * 2 * (modulations * 6 * d * d + z.dim * d + d * d + 2 * d * d)
        if z.prior == "learned":
            total += network(z.prior_layers, 1) + blocks * 2 * d * 2 * z.dim
    if z.coded:
        codes = config.length // z.span if z.kind == "chain" else blocks
        total += (config.length if z.by_place else codes) * 2 * d * z.codes
        total += blocks * 2 * 6 * d * d * (min(1, z.code_layers) if z.shared_modulation else z.code_layers)
        if z.head == "bilinear":
            total += steps * 2 * config.length * (z.head_dim or d) * (d + c.vocab_size)
    return float(total)


def draft_flops(config: ModelConfig, times: int = 1) -> float:
    """Of the small head that writes every token in turn, so many times from the same features."""
    before = config.draft_reach * DRAFT_EMBEDDING
    each = before + config.draft + config.vocab_size
    return float(2 * config.length * config.draft * (config.width + times * each))
