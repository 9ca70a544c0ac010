"""The model: configuration and networks, the calls that objective and sampler need, and its files."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vmd.attention import CleanPrefix
from vmd.codes import CodeDecoder
from vmd.config import InvalidInput, ModelConfig, from_dict, is_whole, require, to_dict
from vmd.data import Dataset
from vmd.data.columns import cells_of, prompt_of
from vmd.data.tokenizers import Tokenizer, is_ours, model_tokenizer
from vmd.files import (
    TOKENIZER_FILE,
    make_folder,
    read_json,
    read_tensors,
    remove_together,
    to_path,
    write_atomically,
    write_tensors,
)
from vmd.latent import Categorical, CodeChain, Gaussian, standard_normal
from vmd.masking import Masks
from vmd.network import Decoder, Encoder, NoEncoder, PriorNetwork, init_weights
from vmd.objective import (
    ChainCodes,
    Codes,
    Loss,
    code_objective,
    code_objective_together,
    draft_objective_together,
    objective,
)
from vmd.predictor import CachedPredictor, Predictor
from vmd.sampling import BATCH_ROWS, Desk, Samples, check_prompt, check_seeds, sample

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
SHIPPED = Path(__file__).with_name("weights")  # models that come with the library


def model_folder(name: str | Path) -> Path:
    """A folder as it is, or a model that comes with the library by its name."""
    require(isinstance(name, (str, os.PathLike)), f"{name!r:.60}: expected a model folder, or the name of a model")
    shipped = {path.parent.name: path.parent for path in SHIPPED.glob(f"*/{CONFIG_FILE}")}
    if os.path.exists(Path(name) / CONFIG_FILE) or str(name) not in shipped:
        also = f", or one that comes with vmd: {', '.join(sorted(shipped))}" if shipped else ""
        require(
            str(name) != "" and os.path.isdir(name),
            f"{str(name)[:200] or repr('')}: expected a model folder with {CONFIG_FILE} and {WEIGHTS_FILE}{also}",
        )
        return Path(name)
    return shipped[str(name)]


class VMD(nn.Module):
    """Variational masked diffusion. Without a latent it is MDM (one block) or BD3-LM (several)."""

    def __init__(self, config: ModelConfig, *, seed: int = 0):
        super().__init__()
        made = isinstance(config, ModelConfig)
        require(made, f"VMD({type(config).__name__}): expected a ModelConfig, such as vmd.preset('text').model")
        require(config.vocab_size > 0, f"model.vocab_size={config.vocab_size}: expected at least 1")
        require(config.length > 0, f"model.length={config.length}: expected at least 1")
        config = config.resolved(config.length, config.vocab_size)
        self.config = config
        self.tokenizer: Tokenizer | None = None  # of a model of text: `model.tokenizer.decode(row)` is what it wrote
        self.usual_z = usual_z({}, config)  # how z is drawn in several steps; training by steps may make it another
        self.fixed = ""  # the positions that were always given in training, as data.fixed has them
        self.stopped_at: int | None = None  # the step of a run that is not finished, if it is one's newest checkpoint
        self.decoder = CodeDecoder(config) if config.latent.coded else Decoder(config)
        gaussian = config.latent.kind == "gaussian"
        encoder = Encoder if config.latent.encoder_layers else NoEncoder
        self.encoder = encoder(config) if gaussian else None
        self.prior_network = PriorNetwork(config) if gaussian and config.latent.prior == "learned" else None
        init_weights(self, torch.Generator().manual_seed(seed))

    @classmethod
    def for_data(cls, config: ModelConfig, data: Dataset, *, seed: int = 0) -> "VMD":
        """A model whose length, vocabulary and symbols are those of the data."""
        known = isinstance(config, ModelConfig) and hasattr(data, "vocab_size")
        given = f"{type(config).__name__}, {type(data).__name__}"
        require(known, f"for_data({given}): expected a ModelConfig and data such as vmd.load_data gives")
        columns = getattr(data, "columns", ())
        return cls(config.resolved(data.length, data.vocab_size, data.symbols, columns), seed=seed)

    @property
    def mask_id(self) -> int:
        """[MASK] follows the vocabulary; it is an input only, never predicted."""
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.decoder.head.weight.device

    @property
    def coder(self) -> CodeDecoder:
        assert isinstance(self.decoder, CodeDecoder), "this model has no codes"
        return self.decoder

    def encode(self, x0: Tensor, mask: Tensor, target: Tensor | None = None) -> Gaussian:
        """q(z^b | x0^{<=b}, xt^b) for every block; of the masked tokens it may see the targets (default: all)."""
        assert self.encoder is not None, "this model has no encoder"
        return self.encoder(x0, mask, target)

    def prior(self, xt: Tensor, x0: Tensor) -> Gaussian | Categorical | CodeChain:
        """p(z^b | xt^b, x0^{<b}) for every block: N(0, I) unless it is learned."""
        if self.config.latent.coded:
            return self.coder.code_features(xt, x0).prior
        return self.gaussian_prior(xt, x0)

    def gaussian_prior(self, xt: Tensor, x0: Tensor) -> Gaussian:
        if self.prior_network is not None:
            return self.prior_network(xt, x0)
        return standard_normal(torch.zeros(self.latent_shape(len(xt)) or (), device=xt.device))

    def denoise(self, xt: Tensor, x0: Tensor, z: Tensor | None = None, prefix: CleanPrefix | None = None) -> Tensor:
        """Logits (B, L, V) of p(x0^b | xt^b, x0^{<b}, z) for all blocks at once; with a prefix, for those behind it."""
        return self.decoder(xt, x0, z, prefix)

    def codes(self, xt: Tensor, x0: Tensor, target: Tensor, prefix: CleanPrefix | None = None) -> Codes | ChainCodes:
        """Prior and likelihood of the targets under every code, (B, blocks, K) each."""
        return self.coder.code_scores(xt, x0, target, prefix)

    def forward(
        self,
        x0: Tensor,
        masks: Masks,
        noise: Tensor | None,
        kl_weight: float | Tensor = 1.0,
        free_bits: float = 0.0,
        focal: float = 0.0,
        score_entropy: bool = False,
        together: float = 0.0,
    ) -> Loss:
        """Algorithms 1 and 3, line "compute the loss": a pure function of its arguments and the weights."""
        if together:
            if self.config.draft:
                return draft_objective_together(self.denoise, x0, masks, self.mask_id, together)
            return code_objective_together(self.coder.code_scores_twice, x0, masks, self.mask_id, together)
        if self.config.latent.coded:
            return code_objective(self.codes, x0, masks, self.mask_id)
        return objective(
            self.denoise,
            None if self.encoder is None else self.encode,
            x0,
            masks,
            self.mask_id,
            prior=None if self.prior_network is None else self.gaussian_prior,
            noise=noise,
            kl_weight=kl_weight,
            free_bits=free_bits,
            focal=focal,
            score_entropy=score_entropy,
            drafts=self.config.draft > 0,
        )

    def latent_shape(self, batch: int) -> tuple[int, int, int] | None:
        """(B, blocks, dim) of the latents of a batch, dim 1 for code numbers, r / span for a chain's; None without one."""
        latent = self.config.latent
        dims = {"none": 0, "gaussian": latent.dim, "categorical": 1, "chain": self.config.block_size // latent.span}
        dim = dims[latent.kind]
        return (batch, self.config.blocks, dim) if dim else None

    def predictor(self, batch: int, *, cached: bool = True, recorded: bool = False) -> Predictor:
        """What the sampler calls, for a batch of that many rows."""
        return CachedPredictor(self, batch, recorded) if cached and self.config.blocks > 1 else Predictor(self)

    def desk(self, rows: int, *, cache: bool = True, record: bool = False) -> Desk:
        """Where batches of `rows` are sampled. Given to `sample` again and again it keeps its memory and its recordings.

        record: steps as CUDA graphs, which are replayed from then on.
        """
        require(is_whole(rows) and rows >= 1, f"a desk of {rows!r} rows: expected a whole number, at least 1")
        cuda = self.device.type == "cuda"
        require(not record or cuda, f"record=True: expected False on {self.device.type}: it needs a GPU")
        return Desk(self, rows, cache=cache, record=record, device=self.device)

    def records(self, prompt: Tensor, *, steps: int = 1, cache: bool = True, **options) -> bool:
        """Whether it pays to record the steps that fill such a prompt."""
        written = int((prompt < 0).any(0).view(self.config.blocks, -1).any(1).sum())
        return cache and self.device.type == "cuda" and is_whole(steps) and written * steps >= RECORDED

    def desk_for(self, prompt: Tensor, batch_size: int = BATCH_ROWS, **options) -> Desk | None:
        """One that serves all batches of such a prompt, if it pays to record their steps."""
        require(is_whole(batch_size) and batch_size >= 1, f"batch_size={batch_size!r}: expected a whole number, at least 1")
        if not self.records(prompt, **options):
            return None
        return self.desk(-(-len(prompt) // -(-len(prompt) // batch_size)), record=True)

    def beginning(self, text: str) -> Tensor:
        """(L,): the tokens of a text, and gaps behind it."""
        if self.tokenizer is None:
            raise InvalidInput(f"prompt {text!r:.60}: expected tokens: this is no model of text")
        tokens, length = self.tokenizer.encode(text), self.config.length
        require(len(tokens) <= length, f"a prompt of {len(tokens)} tokens: expected at most {length}, the model's length")
        return torch.cat([torch.as_tensor(tokens).long(), torch.full((length - len(tokens),), -1)])

    def rows(self, tokens: Tensor) -> list[dict[str, str]]:
        """Of a model of a table: {column: value} of each row."""
        columns, length = self.config.columns, self.config.length
        require(bool(columns), "rows of a table: expected a model of one")
        whole = isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.shape[-1:] == (length,)
        require(whole and tokens.dim() < 3, f"rows of a table: expected a tensor of token ids, (rows, {length})")
        names = [name for name, *_ in columns]
        return [dict(zip(names, cells_of(columns, row), strict=True)) for row in tokens.view(-1, length).tolist()]

    def sample(
        self,
        n: int | None = None,
        *,
        prompt: Tensor | str | Mapping[str, str] | None = None,
        batch_size: int = BATCH_ROWS,
        desk: Desk | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **options,
    ) -> Samples:
        """Draw n sequences, or complete a prompt (n, L) whose gaps are -1.

        Of a model of text, go on from a text n times; of a table, complete a row of which {column: value} is known.

        Options: see `vmd.sampling.sample`; chance comes from `seeds=[...]`, one for each row, or from `generator=`.
        With a `desk`, which may record steps, batches have its size. Without, steps are recorded on a GPU if there are many.
        """
        if prompt is None:
            require(is_whole(n) and n >= 1, f"n={n!r}: expected a whole number of samples, at least 1")  # type: ignore[operator]
            prompt = torch.full((n or 0, self.config.length), -1)
        if isinstance(prompt, Mapping):
            columns = self.config.columns
            require(bool(columns), f"prompt {prompt!r:.60}: expected tokens: this is no model of a table")
            require(n is None or (is_whole(n) and n >= 1), f"n={n!r}: expected a whole number of samples, at least 1")
            prompt = torch.tensor([prompt_of(columns, prompt)]).repeat(n or 1, 1)
        if isinstance(prompt, str):
            require(n is None or (is_whole(n) and n >= 1), f"n={n!r}: expected a whole number of samples, at least 1")
            prompt = self.beginning(prompt).repeat(n or 1, 1)
        check_prompt(prompt, self.config)
        require(n is None or n == len(prompt), f"n={n}: expected {len(prompt)}, the rows of the prompt")
        require(len(prompt) >= 1, "an empty prompt: expected at least one row")
        seeds, wanted = options.pop("seeds", None), len(prompt)
        if seeds is not None:
            check_seeds(seeds, len(prompt))
        desk = desk or self.desk_for(prompt, batch_size, **options)
        batches = -(-len(prompt) // (batch_size if desk is None else desk.rows))
        size = -(-len(prompt) // batches) if desk is None else desk.rows
        if desk is not None:  # all batches have its size: the last is filled up, and what is over is thrown away
            over = batches * size - len(prompt)
            prompt = torch.cat([prompt, prompt[:1].expand(over, -1)])
            seeds = None if seeds is None else [*seeds, *[0] * over]
        parts = []
        was_training = self.training
        self.eval()
        try:
            for start in range(0, len(prompt), size):
                rows = prompt[start : start + size].to(self.device)
                row_seeds = None if seeds is None else seeds[start : start + size]

                def tell(done: int, total: int, before: int = start // size) -> None:
                    on_progress(before * total + done, batches * total)

                parts.append(sample(self, rows, seeds=row_seeds, desk=desk, on_progress=tell, **options))
        finally:
            self.train(was_training)
        return Samples.concatenate(parts).first(wanted)

    def shortened(self, length: int) -> "VMD":
        """The same model for shorter sequences, with the same weights in memory: no block looks at a later one."""
        c = self.config
        if length == c.length:
            return self
        fits = is_whole(length) and c.shortest <= length <= c.length and length % c.block_size == 0
        require(fits, f"length {length!r}: expected {c.shortest} to {c.length}, in whole blocks of {c.block_size}")
        with torch.random.fork_rng(devices=[]):  # nobody's chance is spent on weights that are not kept
            model = VMD(replace(c, length=length, columns=c.columns[:length]))
        own = {name: w[:length] if name.endswith("position.weight") else w for name, w in self.state_dict().items()}
        model.load_state_dict(own, assign=True)
        model.tokenizer, model.usual_z = self.tokenizer, self.usual_z  # positions may be beyond this length
        return model.to(self.device).train(self.training)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of the decoder's backbone (equal with and without z), of the latent pathway or the draft head, of the
        encoder and of the network of a learned prior."""
        counts = {"backbone": 0, "pathway": 0, "encoder": 0, "prior": 0}
        homes = {"encoder": "encoder", "prior_network": "prior"}
        for name, parameter in self.named_parameters():
            part = "backbone" if of_backbone(name) else "pathway"
            counts[homes.get(name.split(".")[0], part)] += parameter.numel()
        return counts

    def save_pretrained(self, folder: str | Path, weights: dict[str, Tensor] | None = None, *, small: bool = False) -> Path:
        """Write `config.json`, `model.safetensors` and, of a model of text, `tokenizer.json`, each whole or not at all.

        `weights`: if not the model's own now. `small`: matrices are rounded to eight bits a number, a quarter of the size.
        """
        folder = to_path(folder, "the model")
        make_folder(folder)
        write_tensors(folder / WEIGHTS_FILE, self.state_dict() if weights is None else weights, small)
        if self.tokenizer is not None:
            write_atomically(folder / TOKENIZER_FILE, json.dumps(self.tokenizer.to_dict()))
        elif is_ours(folder / TOKENIZER_FILE):  # of a model that was here before
            remove_together([folder / TOKENIZER_FILE], folder)
        described = {"format": "vmd", "model": to_dict(self.config), "usual_z": self.usual_z, "fixed": self.fixed}
        write_atomically(folder / CONFIG_FILE, json.dumps(described, indent=2))
        return folder

    def remember(self, folder: Path, described: dict) -> None:
        """How it was trained, by what was written beside it, or by its run: older ones wrote nothing."""
        run = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
        objective, data = (run.get(part) if isinstance(run, dict) else None for part in ("objective", "data"))
        z = usual_z(objective, self.config) if isinstance(objective, dict) else self.usual_z
        fixed = described.get("fixed", data.get("fixed") if isinstance(data, dict) else "")
        self.usual_z = described["usual_z"] if described.get("usual_z") in ("once", "fresh") else z
        self.fixed = fixed if isinstance(fixed, str) else ""

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> "VMD":
        """From a folder, or by name one that comes with the library. Of a run that goes on, its newest checkpoint."""
        from vmd.checkpoints import goes_on, newest_weights

        folder, step = model_folder(folder), None
        if goes_on(folder):
            step, described, weights = newest_weights(folder)
            source = folder / "checkpoints"
        else:
            source = folder / CONFIG_FILE
            described, weights = read_json(source), None
            known = isinstance(described, dict) and described.get("format") == "vmd"
            require(known, f'{source}: not a vmd model: expected "format": "vmd"')
        try:
            model = cls(from_dict(ModelConfig, described.get("model"), "model"))
        except InvalidInput as error:
            raise InvalidInput(f"{source}: {error}") from None
        if weights is None:
            source = folder / WEIGHTS_FILE
            weights = read_tensors(source)
        load_weights(model, weights, source)
        model.stopped_at = step
        model.remember(folder, described)
        model.tokenizer = model_tokenizer(folder)
        require_same_tokens(model, model.tokenizer, str(folder / TOKENIZER_FILE))
        return model.to(device)


def usual_z(objective: dict, config: ModelConfig) -> str:
    """How z is best drawn over several steps: codes that were trained on half-filled blocks are drawn afresh for each."""
    by_steps = objective.get("masking") == "steps"
    one_step = by_steps and objective.get("steps") in ([1], (1,), None)
    whole = by_steps and objective.get("z") == "once"
    return "fresh" if config.latent.coded and not one_step and not whole else "once"


RECORDED = 16  # steps of a batch from which on recording them pays


SAME_NETWORK = ("vocab_size", "layers", "width", "heads", "mlp_ratio", "rotary", "shifted", "board")


def of_backbone(name: str) -> bool:
    """Whether a parameter is of the network that all have: not of a latent or a draft head."""
    parts = ("pathway.", ".modulation.", ".draft.")
    return name.startswith("decoder.") and not any(part in name for part in parts)


def start_from(model: VMD, source: str) -> str:
    """Copy the weights of a trained model, whose network must be alike; what was copied, in words.

    The parts of a latent or a draft head come along if both have the same; else this model's are new.
    """
    other = VMD.from_pretrained(source)
    mine, theirs = model.config, other.config
    for field in SAME_NETWORK:
        ours, wanted = getattr(mine, field), getattr(theirs, field)
        require(ours == wanted, f"model.{field}={ours}: expected {wanted} to start from {source}, which has that")
    alike = not mine.symbols or not theirs.symbols or mine.symbols == theirs.symbols
    alike = alike and mine.columns == theirs.columns
    require(alike, f"{source}: a model of other symbols: expected those of the data, or data in its tokens")
    own, there = model.state_dict(), other.state_dict()
    parts_fit = all(own[name].shape == there[name].shape for name in own.keys() & there.keys() if not of_backbone(name))
    same_z = (mine.latent, mine.draft) == (theirs.latent, theirs.draft) and parts_fit  # some are as large as a block
    taken = {name: tensor for name, tensor in there.items() if name in own and (same_z or of_backbone(name))}
    for name, tensor in taken.items():
        shape, want = tuple(tensor.shape), tuple(own[name].shape)
        require(shape == want, f"{source}: {name} has shape {shape}: expected {want} to start from it")
    model.load_state_dict(taken, strict=False)
    told = f"{len(taken)} tensors of {source}"
    for what, names in (("new", own.keys() - taken.keys()), ("left out", there.keys() - taken.keys())):
        parts = sorted({".".join(name.split(".")[:2]) for name in names})
        told += f"; {what}: {', '.join(parts)}" if parts else ""
    changed = mine.block_size != theirs.block_size
    return told + (f"; blocks of {mine.block_size} in the place of {theirs.block_size}" if changed else "")


def require_same_tokens(model: VMD, tokenizer: Tokenizer | None, source: str) -> None:
    """A tokenizer of other tokens would write nonsense without a word."""
    if tokenizer is None:
        return
    most, symbols = model.config.vocab_size, model.config.symbols  # a model may have more tokens than are used
    fits = tokenizer.vocab_size <= most
    require(fits, f"{source}: a tokenizer of {tokenizer.vocab_size} tokens: expected {most}, the model's vocabulary")
    require(symbols in ((), tokenizer.symbols), f"{source}: a tokenizer of other tokens: expected the model's symbols")


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy the tensors into the model, all or none; names and shapes must be the model's own."""
    expected = model.state_dict()
    missing, foreign = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    require(not missing, f"{source}: {len(missing)} tensors missing, first {missing[:1]}: not weights of this model")
    require(not foreign, f"{source}: {len(foreign)} unknown tensors, first {foreign[:1]}: not weights of this model")
    for name, tensor in tensors.items():
        want = tuple(expected[name].shape)
        require(tuple(tensor.shape) == want, f"{source}: {name} has shape {tuple(tensor.shape)}: expected {want}")
        is_number = tensor.dtype == expected[name].dtype or tensor.is_floating_point()
        require(is_number, f"{source}: {name} is of {tensor.dtype}: expected {expected[name].dtype}")
    model.load_state_dict(tensors)
