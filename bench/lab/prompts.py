"""Prompts by domain, with their lengths: `python -m bench.lab.prompts --tokenizer gpt2`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.runtime.values import first_line, is_integer

from .sources import DOMAINS, Domain, builtin_texts, downloaded_texts, read_file, read_questions

TINY = 5


@dataclass(frozen=True)
class Prompt:
    """prompt_id: the domain and a number, `code_000`; token_count: by the tokenizer of its set."""

    prompt_id: str
    domain: Domain
    raw_text: str
    token_count: int


class PromptDataset:
    """Prompts in their order; sources: where those of each domain come from, in words."""

    def __init__(self, prompts: Sequence[Prompt], sources: Mapping[str, str] | None = None):
        self._prompts, self.sources = list(prompts), dict(sources or {})
        seen: set[str] = set()
        for prompt in self._prompts:
            if prompt.domain not in DOMAINS:
                rule = f"domain of {prompt.prompt_id} must be one of {', '.join(DOMAINS)}"
                raise ValueError(f"PromptDataset: {rule}, got {prompt.domain!r}")
            if prompt.prompt_id in seen:
                raise ValueError(f"PromptDataset: prompt_id must be of one prompt, got {prompt.prompt_id!r} twice")
            seen.add(prompt.prompt_id)

    @classmethod
    def build(
        cls,
        tokenizer: Any,
        n_per_domain: int = 50,
        *,
        files: Mapping[str, str | Path] | None = None,
        questions: str | Path | None = None,
        download: bool = True,
    ) -> PromptDataset:
        """Up to n_per_domain prompts of each domain: of its file, else of its data set on the Hugging Face hub, else
        of the 50 built in. `sources` says which, and why.

        tokenizer  with `encode`; or a name, see `loader.load_tokenizer`; "bytes": that of the embedded pair
        files      by domain, see `sources.read_file`
        questions  all from a `question.jsonl`, as MT-bench has them: first turns, by the domains of their categories
        download   False: the hub is not asked
        """
        _check_count("build", n_per_domain)
        unknown = sorted(set(files or {}) - set(DOMAINS))
        if unknown:
            raise ValueError(f"PromptDataset.build: files must be of {', '.join(DOMAINS)}, got one of {unknown[0]!r}")
        count_tokens, texts, sources = _counter(tokenizer), {}, {}
        asked = [] if questions is None else read_questions(questions)
        for domain in DOMAINS:
            if asked:
                found, sources[domain] = [text for of, text in asked if of == domain], str(questions)
            elif files and domain in files:
                found, sources[domain] = read_file(files[domain]), str(files[domain])
            else:
                found, sources[domain] = _find(domain, n_per_domain, count_tokens, download)
            texts[domain] = found[:n_per_domain]
        return cls(_numbered(texts, count_tokens), sources)

    def save(self, path: str | Path) -> None:
        """As JSON, folders made where there are none."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"sources": self.sources, "prompts": [asdict(prompt) for prompt in self._prompts]}
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PromptDataset:
        """What `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            prompts = [Prompt(**values) for values in content["prompts"]]
            for prompt in prompts:
                if not isinstance(prompt.raw_text, str):
                    raise TypeError(f"raw_text of {prompt.prompt_id} must be a string, got {prompt.raw_text!r}")
            return cls(prompts, content["sources"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"PromptDataset.load: {path} is not what save writes: {error}") from None

    def get_by_domain(self, domain: str) -> list[Prompt]:
        """KeyError for a domain without prompts."""
        found = [prompt for prompt in self._prompts if prompt.domain == domain]
        if not found:
            raise KeyError(
                f"PromptDataset.get_by_domain: domain must be one of {', '.join(self.domains)}, got {domain!r}"
            )
        return found

    def get_all(self) -> list[Prompt]:
        return list(self._prompts)

    def first(self, n_per_domain: int) -> PromptDataset:
        """The same with fewer of each domain."""
        _check_count("first", n_per_domain)
        chosen = [prompt for domain in self.domains for prompt in self.get_by_domain(domain)[:n_per_domain]]
        return PromptDataset(chosen, self.sources)

    @property
    def domains(self) -> list[str]:
        """Those of which there are prompts."""
        return [domain for domain in DOMAINS if any(prompt.domain == domain for prompt in self._prompts)]

    def stats(self) -> dict[str, dict[str, float]]:
        """By domain: n, and min, mean and max of token_count."""
        counts = {domain: [prompt.token_count for prompt in self.get_by_domain(domain)] for domain in self.domains}
        return {
            domain: {"n": len(of), "min": min(of), "mean": statistics.fmean(of), "max": max(of)}
            for domain, of in counts.items()
        }

    def print_stats(self) -> None:
        print(f"{'domain':<16} {'n':>5} {'min':>6} {'mean':>8} {'max':>6}   source")
        for domain, row in self.stats().items():
            numbers = f"{row['n']:>5} {row['min']:>6} {row['mean']:>8.1f} {row['max']:>6}"
            print(f"{domain:<16} {numbers}   {self.sources.get(domain, '-')}")

    def __len__(self) -> int:
        return len(self._prompts)

    def __repr__(self) -> str:
        parts = ", ".join(f"{domain} {row['n']}" for domain, row in self.stats().items())
        return f"PromptDataset({len(self)} prompts: {parts or 'none'})"


def _check_count(method: str, n_per_domain: Any) -> None:
    if not is_integer(n_per_domain) or n_per_domain < 1:
        raise ValueError(f"PromptDataset.{method}: n_per_domain must be an int of at least 1, got {n_per_domain!r}")


def _find(domain: str, count: int, count_tokens: Callable[[str], int], download: bool) -> tuple[list[str], str]:
    """Texts and their source."""
    reason = "the hub was not asked"
    if download:
        try:
            found = downloaded_texts(domain, count, count_tokens)
            if found:
                return found, "Hugging Face hub"
            reason = "the data set has none"
        except Exception as error:  # whatever the hub's libraries raise where there is no network, say
            reason = first_line(error)
    return builtin_texts(domain), f"built in ({reason})"


def _numbered(texts: Mapping[str, Sequence[str]], count_tokens: Callable[[str], int]) -> list[Prompt]:
    return [
        Prompt(f"{domain}_{number:03}", domain, text, count_tokens(text))
        for domain, found in texts.items()
        for number, text in enumerate(found)
    ]


def _counter(tokenizer: Any) -> Callable[[str], int]:
    if tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif isinstance(tokenizer, (str, Path)):
        from .loader import load_tokenizer

        tokenizer = load_tokenizer(tokenizer)
    return lambda text: len(tokenizer.encode(text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, prints and saves; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.prompts", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", required=True, help="bytes, a folder, or a model of the Hugging Face hub")
    about = f"JSON file of all prompts, beside which OUTPUT_tiny.json has {TINY} of each domain (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("data/prompts.json"), help=about)
    parser.add_argument("--n-per-domain", type=int, default=50)
    parser.add_argument(
        "--file", action="append", default=[], metavar="DOMAIN=FILE", help="take a domain's from a file"
    )
    parser.add_argument("--questions", type=Path, help="all from a question.jsonl of MT-bench's kind")
    parser.add_argument("--no-download", action="store_true", help="do not ask the hub for data sets")
    options = parser.parse_args(arguments)
    try:
        files = dict(part.partition("=")[::2] for part in options.file)
        given = {"files": files, "questions": options.questions, "download": not options.no_download}
        dataset = PromptDataset.build(options.tokenizer, options.n_per_domain, **given)
        dataset.print_stats()
        tiny = options.output.with_name(f"{options.output.stem}_tiny{options.output.suffix}")
        for path, chosen in ((options.output, dataset), (tiny, dataset.first(TINY))):
            chosen.save(path)
            print(f"saved {len(chosen)} prompts: {path}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
