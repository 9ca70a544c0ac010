"""Configurations: frozen dataclasses that any `--set section.field=value` can override. Imports no torch."""

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints


class InvalidInput(ValueError):
    """A user's mistake, told in one line that names the value and what was expected."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)


def require_choice(name: str, value: Any, choices: tuple) -> None:
    require(value in choices, f"{name}={value!r}: expected one of {', '.join(map(str, choices))}")


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def require_types(section: str, config: Any) -> None:
    """Every field is of the type that it is declared with: Python would find out only where it is used.

    Lists, paths, and numbers of numpy and torch become what is declared, so that they can be compared and written.
    """
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    for name, hint in get_type_hints(type(config)).items():
        value, where = getattr(config, name), f"{section}.{name}" if section else name
        if get_origin(hint) is Literal:
            require_choice(where, value, get_args(hint))
            continue
        several = get_origin(hint) is tuple
        kind = get_args(hint)[0] if several else hint
        kind = get_origin(kind) or kind  # tuples of tuples
        if several and isinstance(value, list):
            value = tuple(tuple(part) if isinstance(part, list) else part for part in value)
        elif kind is str and isinstance(value, Path):
            value = str(value)
        elif getattr(value, "shape", None) == ():
            value = value.item()
        object.__setattr__(config, name, value)
        fits = {int: is_whole, float: is_number}.get(kind, lambda some, kind=kind: isinstance(some, kind))
        good = isinstance(value, tuple) and all(map(fits, value)) if several else fits(value)
        if not good:  # the value may be long to write
            what = names.get(kind, f"a {kind.__name__}")
            raise InvalidInput(f"{where}={value!r:.60}: expected {f'a tuple, each {what}' if several else what}")


def require_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    limits = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
    require(low <= value <= high, f"{name}={value}: expected a number {limits}")


@dataclass(frozen=True)
class LatentConfig:
    """The latent of each block: a Gaussian with an encoder that infers it while training, or one of K codes, summed over."""

    # categorical: one of K codes for a block. chain: a code for each of its tokens, a Markov chain of K states.
    kind: Literal["none", "gaussian", "categorical", "chain"] = "gaussian"
    # gaussian
    dim: int = 32
    encoder_layers: int = 2  # 0: z is drawn from the prior while training too, and carries nothing (a control)
    encoder_stream: Literal["single", "doubled"] = "single"  # (x0, mask bit), or the paper's [xt ; x0]
    encoder_sees_mask: bool = True  # the paper's q(z | x0, xt); off: q(z | x0), one meaning of z for all steps
    on_clean: bool = False  # z^b also modulates the clean block b, so that later blocks see it (the paper's z^{<=b})
    pool: Literal["mean", "gated"] = "mean"  # how the encoder sums up a block; gated: a learned weighted mean
    shared_modulation: bool = False  # one adaptive norm for all layers (the paper's Sudoku; DiT-Air), not one for each
    prior: Literal["normal", "learned"] = "normal"  # the paper's N(0, I), or p(z^b | revealed tokens, earlier blocks)
    prior_layers: int = 1  # of the network of a learned prior
    # categorical and chain
    codes: int = 64
    head: Literal["bilinear", "additive"] = "bilinear"  # how the code enters the output layer; additive is worse
    head_dim: int = 0  # rank of the bilinear head; 0: the width
    # For short blocks: a code scales and shifts every place of a block in its own way, and its prior has weights for each.
    by_place: bool = False
    code_layers: int = 0  # the code also modulates the last layers, this many: better, at their cost for every code
    code_chunk: int = 0  # codes scored at a time, to bound memory; 0: as many as fit a fixed budget
    span: int = 1  # of a chain: so many neighbours share a code; half the block size: two codes for a block

    def __post_init__(self) -> None:
        require_types("model.latent", self)
        require_range("model.latent.dim", self.dim, 1, 65_536)
        require_range("model.latent.encoder_layers", self.encoder_layers, 0, 1_000)
        require_range("model.latent.prior_layers", self.prior_layers, 1, 1_000)
        require_range("model.latent.codes", self.codes, 2, 65_536)
        require_range("model.latent.head_dim", self.head_dim, 0, 65_536)
        require_range("model.latent.code_layers", self.code_layers, 0, 1_000)
        require_range("model.latent.code_chunk", self.code_chunk, 0)
        require_range("model.latent.span", self.span, 1)
        require(
            self.span == 1 or self.kind == "chain", f"model.latent.span={self.span}: expected 1 without a chain of codes"
        )
        require(
            not (self.coded and self.prior == "learned"),
            "model.latent.prior=learned: expected normal with a latent of codes, whose prior is learned anyway",
        )
        require(
            not (self.head == "additive" and self.head_dim),
            f"model.latent.head_dim={self.head_dim}: expected 0 with head=additive, which has no rank",
        )
        require(
            not (self.coded and self.on_clean),
            "model.latent.on_clean=true: expected false with a latent of codes, which are summed block by block",
        )
        require(
            not (self.kind == "gaussian" and self.prior == "learned" and not self.encoder_layers),
            "model.latent.encoder_layers=0: expected at least 1 with a learned prior: without an encoder z is N(0, I)",
        )
        require(
            self.kind != "chain" or not self.code_layers,
            f"model.latent.code_layers={self.code_layers}: expected 0 with a chain, whose codes differ from token to token",
        )

    @property
    def coded(self) -> bool:
        return self.kind in ("categorical", "chain")


MOST_PLACES = 128  # whose features a prior of codes reads by themselves
DRAFT_REACH, DRAFT_EMBEDDING = (8, 16), 64  # a token written in turn sees so many before it, each as so many numbers


@dataclass(frozen=True)
class ModelConfig:
    """What the network is. One block: MDM, or VMD with a latent. Several blocks: BD3-LM, or block VMD with a latent."""

    vocab_size: int = 0  # 0: taken from the data
    length: int = 0  # 0: taken from the data
    block_size: int = 0  # 0: one block, the whole sequence
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp_ratio: int = 4
    prompt: int = 0  # the first tokens, which are always given (with data.fixed): a gated pool leaves them out
    rotary: bool = True  # positions also turn queries and keys; off: learned absolute positions alone, as in GPT-2
    shifted: bool = False  # a token is predicted where the one before it stands, as in GPT-2; one block, no latent
    board: bool = False  # tokens are the cells of a square board: its rows, columns and boxes have embeddings
    # Width of a small head by which the tokens of one step are written in turn, each in sight of those before it in its
    # block; the network is still evaluated once for all of them. 0: all at once, blind to each other. Without a latent.
    draft: int = 0
    latent: LatentConfig = field(default_factory=LatentConfig)
    symbols: tuple[str, ...] = ()  # what the token ids stand for, if they have names
    columns: tuple[tuple[str, ...], ...] = ()  # of a table, for every place: its name, and what the ids stand for there

    def __post_init__(self) -> None:
        require_types("model", self)
        require_range("model.vocab_size", self.vocab_size, 0, 65_536)
        require_range("model.length", self.length, 0, 1_000_000)
        require_range("model.block_size", self.block_size, 0)
        require_range("model.layers", self.layers, 1, 1_000)
        require_range("model.width", self.width, 2, 65_536)
        require_range("model.heads", self.heads, 1, self.width)
        require_range("model.mlp_ratio", self.mlp_ratio, 1, 64)
        require_range("model.prompt", self.prompt, 0)
        require(
            not self.length or self.prompt < self.length,
            f"model.prompt={self.prompt}: expected fewer than the {self.length} tokens of a sequence",
        )
        require(
            self.width % (2 * self.heads) == 0,
            f"model.width={self.width}: expected a multiple of 2 * model.heads = {2 * self.heads}",
        )
        require(
            not self.latent.coded or self.latent.code_layers < self.layers,
            f"model.latent.code_layers={self.latent.code_layers}: expected fewer than model.layers = {self.layers}: "
            "the prior of the code comes from the layers before",
        )
        tokens = self.block_size or self.length
        require(
            not (self.latent.coded and self.latent.by_place) or tokens <= MOST_PLACES,
            f"model.latent.by_place=true with blocks of {tokens}: expected at most {MOST_PLACES} tokens in a block "
            "(--set model.latent.by_place=false)",
        )
        require(
            not self.shifted or (self.latent.kind == "none" and self.block_size in (0, self.length)),
            "model.shifted=true: expected one block and no latent: the last token of a block would see the next one",
        )
        require_range("model.draft", self.draft, 0, 65_536)
        require(
            not self.draft or (self.latent.kind == "none" and not self.shifted and self.length != 1),
            f"model.draft={self.draft}: expected 0 with a latent, with shifted, and with one token",
        )
        if self.board and self.length:
            whole = math.isqrt(math.isqrt(self.length)) ** 4 == self.length
            require(whole, f"model.board=true with length {self.length}: expected a square board, such as 16 or 81 cells")
        if self.block_size and self.length:
            require(
                self.length % self.block_size == 0,
                f"model.block_size={self.block_size}: expected a divisor of the length {self.length}",
            )
        require(
            not self.block_size or self.block_size % self.latent.span == 0,
            f"model.latent.span={self.latent.span}: expected a divisor of the block size {self.block_size}",
        )
        require(
            not self.symbols or not self.vocab_size or len(self.symbols) == self.vocab_size,
            f"model.symbols has {len(self.symbols)} names: expected one for each of the {self.vocab_size} token ids",
        )
        names = sorted(self.symbols)
        twice = [name for name, following in itertools.pairwise(names) if name == following]
        require(not twice, f"model.symbols: {twice[:1]} twice: expected a name of its own for each token id")
        if self.columns:
            most = max(len(column) - 1 for column in self.columns)
            fit = min(map(len, self.columns)) > 1 and self.length in (0, len(self.columns))
            fit = fit and all(isinstance(name, str) for column in self.columns for name in column)
            fit = fit and (not self.vocab_size or most <= self.vocab_size)
            told = f"model.columns: {len(self.columns)} of up to {most} values"
            require(fit, f"{told}: expected one for each of {self.length} places, of 1 to {self.vocab_size} values")

    @property
    def blocks(self) -> int:
        return self.length // self.block_size

    @property
    def draft_reach(self) -> int:
        """How many tokens before a place its draft sees: as far as its block may begin, within limits."""
        least, most = DRAFT_REACH
        return min(self.length - 1, max(least, min(self.block_size - 1, most)))

    @property
    def shortest(self) -> int:
        """The least length, in whole blocks, at which a model has the same weights: a draft head sees back so far."""
        if self.blocks == 1 or self.prompt:
            return self.length
        least = self.draft_reach + 1 if self.draft else 1
        return -(-least // self.block_size) * self.block_size

    @property
    def has_latent(self) -> bool:
        return self.latent.kind != "none"

    @property
    def tokens_agree(self) -> bool:
        """Tokens of one step depend on each other: then training masks by counts or times is a surrogate, not a bound."""
        return self.has_latent or self.draft > 0

    @property
    def bounded_by_counts(self) -> bool:
        """Whether the paper's objective, by mask counts, bounds the likelihood of one token a step."""
        return not self.has_latent and (not self.draft or self.block_size == 1)

    @property
    def z_reaches_later_blocks(self) -> bool:
        """Then a likelihood cannot be taken block by block, and z must be drawn once per block."""
        return self.latent.kind == "gaussian" and self.latent.on_clean and self.blocks > 1

    def resolved(
        self,
        length: int,
        vocab_size: int,
        symbols: tuple[str, ...] = (),
        columns: tuple[tuple[str, ...], ...] = (),
    ) -> "ModelConfig":
        """Fill in what the data decides."""
        require(not self.columns or columns in ((), self.columns), "a table of other columns, or values, than the model's")
        require(
            self.length in (0, length), f"model.length={self.length}: expected {length}, the length of the data's sequences"
        )
        require(
            self.vocab_size == 0 or self.vocab_size >= vocab_size,
            f"model.vocab_size={self.vocab_size}: expected at least {vocab_size}, the largest token id of the data plus one",
        )
        return dataclasses.replace(
            self,
            length=length,
            vocab_size=self.vocab_size or vocab_size,
            block_size=self.block_size or length,
            symbols=self.symbols or symbols,
            columns=self.columns or columns,
        )


@dataclass(frozen=True)
class ObjectiveConfig:
    """How masks are drawn and what the KL term weighs (in nats, summed over the latent's dimensions)."""

    # counts and times: Eq. 2, 5 and 7. steps: the certified bound of the sampler that will be run. linear: 20 times, each
    # of a weight that falls linearly with the share that is masked, as in Ye et al. 2025; no bound.
    masking: Literal["counts", "times", "steps", "linear"] = "counts"
    # Of tokens, without a latent: sum_v e^f_v - 1 - f_x instead of log sum_v e^f_v - f_x for outputs f. That is SEDD with
    # absorbing states (Lou et al. 2024) in the log-linear schedule, whose scores are e^f (1 - t) / t.
    score_entropy: bool = False
    focal: float = 0.0  # a token of probability p weighs (1 - p)^focal (Ye et al. 2025: 1); no bound; without a latent
    whole: float = 0.0  # of masking=counts: this share of blocks is masked whole besides, for samplers of few steps
    # Of masking=counts, with codes or a draft head: masked tokens are scored twice, as if one step wrote all of them, with
    # this weight, and as if each was written alone, with the rest. Trains for few steps and for many; 0: as the paper does.
    together: float = 0.0
    steps: tuple[int, ...] = (1,)  # of masking=steps: numbers of steps per block, equally often
    z: Literal["fresh", "once"] = "fresh"  # of masking=steps: how the sampler draws z
    samples: int = 1  # draws of z from the encoder; more than one: the importance-weighted bound
    kl_weight: float = 1.0
    kl_warmup_steps: int = 0  # the weight rises linearly from 0 over these steps
    free_bits: float = 0.0  # nats per block below which the KL is not pushed down

    def __post_init__(self) -> None:
        require_types("objective", self)
        require(len(self.steps) > 0, "objective.steps is empty: expected numbers of steps per block, such as 1,2")
        for count in self.steps:
            require_range("objective.steps", count, 1)
        require_range("objective.samples", self.samples, 1, 1_000_000)
        require(0 <= self.whole < 1, f"objective.whole={self.whole}: expected a share, 0 or more and less than 1")
        require(0 <= self.together <= 1, f"objective.together={self.together}: expected a share, from 0 to 1")
        require_range("objective.kl_weight", self.kl_weight, 0)
        require_range("objective.kl_warmup_steps", self.kl_warmup_steps, 0)
        require_range("objective.free_bits", self.free_bits, 0)
        require(
            self.focal == 0 or 1 <= self.focal <= 100,
            f"objective.focal={self.focal}: expected 0, or 1 to 100: below 1 sure tokens have infinite gradients",
        )
        require(
            self.samples == 1 or (self.kl_weight == 1 and not self.kl_warmup_steps and not self.free_bits),
            f"objective.samples={self.samples}: expected kl_weight 1, no warm-up and no free bits: "
            "importance weights have no KL term to weigh",
        )

    def check(self, model: ModelConfig) -> None:
        """What depends on the model, or on several fields."""
        if self.masking != "steps":
            shown = ",".join(map(str, self.steps))
            require(self.steps == (1,), f"objective.steps={shown}: expected only with objective.masking=steps")
            require(self.z == "fresh", f"objective.z={self.z}: expected only with objective.masking=steps")
        wanted = self.masking == "counts" or not self.whole
        require(wanted, f"objective.whole={self.whole}: expected only with objective.masking=counts")
        require(
            self.masking != "steps" or max(self.steps) <= model.block_size,
            f"objective.steps={max(self.steps)}: expected 1 to {model.block_size}, the block size",
        )
        if self.together:
            share = f"objective.together={self.together}: expected 0 (--set objective.together=0)"
            require(model.draft > 0 or model.latent.coded, f"{share} without codes or a draft head")
            for name, plain in (("masking", "counts"), ("whole", 0), ("focal", 0)):
                value = getattr(self, name)
                require(value == plain, f"{share} with objective.{name}={value}")
        require(not self.focal or not model.has_latent, f"objective.focal={self.focal}: expected 0 with a latent")
        require(
            not self.score_entropy or not (model.tokens_agree or self.focal or self.masking == "steps"),
            "objective.score_entropy=true: expected no latent, no draft, no focal weights, and masking other than steps: "
            "it has a bound of its own",
        )
        require(
            self.samples == 1 or model.has_latent,
            f"objective.samples={self.samples}: expected 1 without a latent: there is no z to draw",
        )
        if model.latent.coded:
            for name, plain in (("kl_weight", 1), ("samples", 1), ("kl_warmup_steps", 0), ("free_bits", 0)):
                value = getattr(self, name)
                require(
                    value == plain,
                    f"objective.{name}={value}: expected {plain} with a latent of codes: "
                    "it is summed exactly and has no KL term",
                )
        if model.z_reaches_later_blocks:
            require(
                self.samples == 1,
                f"objective.samples={self.samples}: expected 1 with model.latent.on_clean: z of a block reaches later "
                "blocks, and importance weights of single blocks would be no bound",
            )
            require(
                self.masking != "steps" or self.z == "once" or max(self.steps) == 1,
                "objective.z=fresh: expected once with model.latent.on_clean: which draw later blocks see is undefined",
            )


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 1_500
    batch_size: int = 256
    optimizer: Literal["adam", "adamw", "muon"] = "adam"  # muon: of the layers' matrices, with adamw for the rest
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "cosine"  # after the warm-up; the last two end at zero
    warmup_steps: int = 0
    clip: float = 1.0  # largest gradient norm; 0: no clipping
    ema: float = 0.0  # decay of the averaged weights that are evaluated and saved; 0: the raw weights
    precision: Literal["float32", "tf32", "bf16"] = "float32"  # tf32 matrix products, bf16 autocast: CUDA only
    compile: bool = False
    # On a GPU: a dense mask, FlexAttention's tiles, or kernels that skip what is not seen and turn positions as they load.
    attention: Literal["dense", "tiles", "fused"] = "dense"
    capture: bool = False  # record the whole step as one CUDA graph and replay it: small models no longer wait for launches
    # Codes that are hardly missed take over half of the costliest ones, in the first three quarters of a run; 0: never.
    split_codes_every: int = 100
    accumulate: int = 1  # parts into which a process's share of the batch is cut, to fit memory; their gradients add up
    parallel: Literal["ddp", "fsdp"] = "ddp"  # of several processes: each has all weights, or a share of each weight
    # A trained model to start from, by its folder or, of those that come with vmd, its name. Parts that it has not are new.
    init: str = ""
    freeze: bool = False  # the network stays as it is, and only the latent's parts, or the draft head, learn
    seed: int = 0
    log_every: int = 50
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        require_types("training", self)
        for name in ("steps", "log_every", "checkpoint_every", "accumulate"):
            require_range(f"training.{name}", getattr(self, name), 1)
        require_range("training.batch_size", self.batch_size, 1, 1_000_000_000)
        for name in ("weight_decay", "warmup_steps", "clip", "split_codes_every"):
            require_range(f"training.{name}", getattr(self, name), 0)
        require_range("training.seed", self.seed, 0, 2**62)
        require(
            0 < self.learning_rate <= 1e30,
            f"training.learning_rate={self.learning_rate}: expected a positive number up to 1e30",
        )
        require(0 <= self.ema < 1, f"training.ema={self.ema}: expected a decay in [0, 1)")


@dataclass(frozen=True)
class DataConfig:
    name: str = ""  # a named data set, an .npy array of integers (rows, length), or a text file or folder
    tokenizer: str = ""  # of text: char (the default), byte, or the path of a `tokenizers` JSON file
    documents: bool = False  # of text: chunks never cross files of a folder, or blank lines of a file
    puzzles: bool = False  # the file holds Sudoku puzzles, in any format that is known; .sudoku files always do
    augment: bool = True  # of puzzles: a random symmetry of the board every time
    layout: Literal["board", "pair"] = "board"  # of puzzles: clues in place, or the paper's puzzle, [SEP], solution, [EOS]
    fixed: str = ""  # positions that are always given, as in "0:82" or "0,5,7": the model learns the rest given these

    def __post_init__(self) -> None:
        require_types("data", self)


@dataclass(frozen=True)
class RunConfig:
    """Everything a training run needs: the sections of the command line's `--set section.field=value`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        require_types("", self)


Config = TypeVar("Config")


def override(config: Config, path: str, value: Any) -> Config:
    """`override(run, "training.steps", "100")`: a copy with one field changed; text is read as the field's type."""
    return _override(config, {path: value}, "")


def override_all(config: Config, settings: list[str]) -> Config:
    """Apply `a.b=c` strings; what fields demand of each other is checked when all are applied."""
    changes = {}
    for setting in settings:
        path, equals, value = str(setting).partition("=")
        require(bool(equals), f"--set {setting!r}: expected field=value")
        changes[path.strip()] = value.strip()
    return _override(config, changes, "")


def _override(config: Config, changes: dict[str, Any], section: str) -> Config:
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    hints = get_type_hints(type(config))
    changed: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        meant = [
            f"{name}.{head}"
            for name, hint in hints.items()
            if dataclasses.is_dataclass(hint) and head in {f.name for f in dataclasses.fields(hint)}
        ]
        listed = " or ".join(meant) or "one of " + ", ".join(section + name for name in fields)
        require(head in fields, f"unknown field {section + path!r}: expected {listed}")
        current = getattr(config, head)
        if dataclasses.is_dataclass(current):
            names = ", ".join(f"{section}{head}.{f.name}" for f in dataclasses.fields(current))
            require(bool(rest), f"{section + path!r} is a section: expected one of {names}")
            inner.setdefault(head, {})[rest] = value
            continue
        require(not rest, f"unknown field {section + path!r}: {section + head!r} has no fields of its own")
        changed[head] = _parse(value, hints[head], section + path)
    for head, some in inner.items():
        changed[head] = _override(getattr(config, head), some, f"{section}{head}.")
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]


def to_dict(config: Any) -> dict:
    return dataclasses.asdict(config)


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 64}} -> {"model.width": 64}: the names that `--set` takes."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def with_new_fields(saved: dict) -> dict:
    """A run's configuration that was written before some fields were there: these have their defaults."""
    try:
        return to_dict(from_dict(RunConfig, saved))
    except InvalidInput:  # of another version altogether
        return saved


def from_dict(cls: type[Config], values: Any, where: str = "config") -> Config:
    """The inverse of `to_dict`, refusing unknown fields and wrong types."""
    require(isinstance(values, dict), f"{where}: expected an object, got {values!r:.60}")
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    require(not unknown, f"{where}: unknown field {', '.join(unknown)}")
    parsed = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            parsed[name] = from_dict(hints[name], value, f"{where}.{name}")
        else:
            parsed[name] = _parse(value, hints[name], f"{where}.{name}")
    return cls(**parsed)


def _parse(value: Any, hint: Any, path: str) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        require_choice(path, value, get_args(hint))
        return value
    if origin is tuple:
        items = _parse_list(value, path)
        return tuple(_parse(item, get_args(hint)[0], path) for item in items)
    if hint is bool:
        known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        key = str(value).lower()
        require(key in known, f"{path}={value!r}: expected true or false")
        return known[key]
    if hint is int:
        try:
            number = float(value)
            require(not isinstance(value, bool) and number == int(number), f"{path}={value!r}: expected an integer")
            return int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else int(number)
        except (ValueError, TypeError, OverflowError):
            raise InvalidInput(f"{path}={value!r}: expected an integer") from None
    if hint is float:
        try:
            number = float(value)
        except (ValueError, TypeError):
            raise InvalidInput(f"{path}={value!r}: expected a number") from None
        require(number == number and abs(number) != float("inf"), f"{path}={value!r}: expected a finite number")
        return number
    require(isinstance(value, str), f"{path}={value!r}: expected text")
    return value


def _parse_list(value: Any, path: str) -> list:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, str) and value.startswith("["):
        try:
            return list(json.loads(value))
        except ValueError:
            raise InvalidInput(f"{path}={value!r}: expected a JSON list or comma-separated values") from None
    return [item for item in str(value).split(",") if item]
