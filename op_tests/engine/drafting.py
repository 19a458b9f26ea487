"""Watches an engine's drafts, and runs plain steps between them; for tests of drafters."""

from eagle_kernels import SamplingParams
from eagle_kernels.engine.drafters.block_drafter import BlockDrafter
from eagle_kernels.engine.drafters.model_drafter import ModelDrafter
from op_tests.engine.view import View


class BlockOracle:
    """Checks each step's drafts of a `BlockDrafter` against `drafts(text, config)`, which a subclass has."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.num_checked = engine, 0
        propose = BlockDrafter.propose

        def checked(drafter, batch):
            proposal, config = propose(drafter, batch), drafter._config
            drafts = proposal.tree.draft_tokens.view(len(batch), -1)[:, 1:].tolist()
            for row in View(engine).rows:
                if row.is_running and row.index < len(batch):
                    text = row.request.prompt + row.request.output_ids
                    if len(text) == batch.lengths[row.index]:  # the first token is not read back yet
                        text.append(int(batch.roots[row.index]))
                    want = self.drafts(text, config)
                    assert drafts[row.index] == want, f"{drafts[row.index]} instead of {want} after {text}"
                    self.num_checked += 1
            return proposal

        monkeypatch.setattr(BlockDrafter, "propose", checked)


class ModuleOracle:
    """Checks each proposal of next-token modules against `drafts(text, num_steps)`, which a subclass has."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.num_checked = engine, 0
        propose = ModelDrafter._draft

        def checked(drafter, batch):
            tree, parents = propose(drafter, batch)
            drafts = tree.draft_tokens.view(len(batch), -1)[:, 1:].tolist()
            for row in View(engine).rows:
                if row.is_running and row.index < len(batch):
                    text = row.request.prompt + row.request.output_ids
                    if len(text) == batch.lengths[row.index]:  # the first token is not read back yet
                        text.append(int(batch.roots[row.index]))
                    want = self.drafts(text, drafter._config.num_steps)
                    assert drafts[row.index] == want, f"{drafts[row.index]} instead of {want} after {text}"
                    self.num_checked += 1
            return tree, parents

        monkeypatch.setattr(ModelDrafter, "_draft", checked)


def pause_between_drafts(engine, prompts, is_long: bool = False) -> list:
    """Returns finished requests; plain steps, few and many, came between their drafts. is_long: one by one, too."""
    requests = []
    for rest, pause in ((40, 0), (3, 1), (25, 2), (50, 7)):
        requests.append(engine.submit(prompts[pause % 4], SamplingParams(max_new_tokens=rest)))
        engine.is_speculating = pause == 0
        for _ in range(pause):
            engine.step()
        engine.is_speculating = True
        engine.step()
    engine.is_speculating = False
    for _ in range(19):
        engine.step()
    engine.is_speculating = True
    engine.collect()
    if is_long:
        requests.append(engine.submit(prompts[0], SamplingParams(max_new_tokens=20)))
        for number in range(10):
            engine.is_speculating = number % 2 == 0
            engine.step()
        engine.is_speculating = True
        engine.collect()
    return requests
