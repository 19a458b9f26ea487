"""Bugs of the engine, which whole texts see, or drafts, or the noise that was drawn; of the runtime and of tools."""

from __future__ import annotations

from .mutant import ENGINE, RUNTIME, TOOLS, Mutant

_DRAFTER = ENGINE + "drafters/model_drafter.py"
_PAGES, _READING = ENGINE + "batch/prefix_cache.py", ENGINE + "serve/reading.py"
_HELD = ["op_tests/engine/serve/test_pages.py::test_pages_hold_what_their_requests_would_have_written"]
_ALL_SHARED = ["op_tests/engine/serve/test_pages.py::test_all_that_is_known_is_shared"]
_REQUEST, _DETOKENIZER = ENGINE + "requests/request.py", ENGINE + "models/detokenizer.py"
_ROWS, _CHOICE = ENGINE + "batch/state.py", ENGINE + "step/choice.py"
_BUSY = "op_tests/engine/serve/test_scheduler.py::test_requests_of_all_kinds_are_those_alone"
_MOVED = "op_tests/engine/serve/test_scheduler.py::test_all_that_belongs_to_a_row_moves_with_it"
_ASKED, _CHOSEN = "op_tests/engine/test_requests_ask.py::test_", "op_tests/engine/test_speculation.py::test_"
_STOPS = "op_tests/engine/test_stop_strings.py::test_texts_and_streams_end_where_a_search_says"
_GENERATE = TOOLS + "cli/generate.py"
_CHAT = ENGINE + "models/chat_template.py"
_OF_FILES = ["op_tests/engine/test_chat_template.py::test_of_special_tokens_the_file_that_counts_is_read"]
_STATISTICS = "op_tests/engine/test_generation.py::test_statistics_are_what_the_steps_did"
_OWN_VALUES = "op_tests/engine/test_config.py::test_a_call_has_its_own_values_and_the_next_one_those_of_the_engine"
_TIMES = ["op_tests/engine/test_generation.py::test_times_of_a_call_are_those_of_its_steps"]
_JUDGES = ["op_tests/engine/serve/test_joint_steps.py::test_times_of_steps_reach_those_who_judge_by_them"]
_PLAIN_STEPS = "op_tests/engine/test_generation.py::test_a_plain_step_is_timed_with_the_rows_that_step"
_TABLES = ["op_tests/engine/test_generation.py::test_trees_of_a_table_are_refused_as_one_s_own"]
_LAST = ["op_tests/engine/test_method_ends.py::test_no_model_is_asked_for_what_its_tables_do_not_hold"]
_NUMBERS = ["op_tests/engine/test_requests_ask.py::test_refused_prompts_have_their_numbers"]
_LOAD = ["op_tests/tools/test_load_benchmarks.py::test_figures_of_requests"]
_SCHEDULER, _STREAM, _PAIRING = ENGINE + "serve/scheduler.py", ENGINE + "serve/stream.py", ENGINE + "config/pairing.py"
_HISTORY = "op_tests/engine/test_choice_by_history.py::test_"
_LIMITS = "op_tests/engine/serve/test_limits.py::test_"
_NEVER = "op_tests/engine/serve/test_as_if_never.py::test_"
_SHARING = "op_tests/engine/serve/test_prefix_sharing.py::test_"


def _law(*cases: str) -> list[str]:
    name = "op_tests/engine/test_verify_strategies.py::test_lossless_strategies_keep_the_law"
    return [f"{name}[{case}]" for case in cases]


def _inspected(*cases: str) -> list[str]:
    name = "op_tests/engine/test_noise_keys.py::test_no_noise_is_inspected_twice"
    return [f"{name}[{case}]" for case in cases]


MUTANTS = [
    Mutant(
        "the last token of the prompt before",
        [(ENGINE + "serve/prompts.py", "(*inner, size - 1)", "(*inner, size - 2)")],
        [_BUSY],
    ),
    Mutant(
        "scores of prompts after the mark",
        [(ENGINE + "serve/prompts.py", "scores = [_score_part(part) for part in parts]",
          "scores = (_score_part(part) for part in parts)")],
        ["op_tests/engine/serve/test_prompts.py::test_scores_of_prompts_are_queued_before_the_first_token_is_marked"],
    ),
    Mutant(
        "a node with the logits of its row",
        [(ENGINE + "step/packed_rows.py", "index_copy_(0, self._node, values)",
          "index_copy_(0, self._node[0] + torch.arange(len(values), device=values.device), values)")],
        ["op_tests/engine/test_ragged_trees.py::test_texts_are_those_of_plain_decoding"],
    ),
    Mutant(
        "a prompt with the logits of the step beside it",
        [(ENGINE + "step/stepper.py", "num_nodes + prompts.lasts", "prompts.lasts")],
        [_BUSY],
    ),
    Mutant(
        "a queue of prompts that never ends",
        [(ENGINE + "serve/reading.py", "len(unread) == 1 and num_rows", "len(unread) >= 1 and num_rows")],
        ["op_tests/engine/serve/test_joint_steps.py::test_where_prompts_are_read"],
    ),
    Mutant(
        "a stale cost table",
        [(ENGINE + "step/choice.py", "return Fastest(self._most_tokens, self._most_rows, self._rows, (",
          "return self or Fastest(self._most_tokens, self._most_rows, self._rows, (")],
        ["op_tests/engine/serve/test_joint_steps.py::test_times_beside_prompts_are_kept_apart"],
    ),
    Mutant(
        "later drafts with the noise of the first",
        [(_DRAFTER, "(batch.lengths + 1 + depth)", "(batch.lengths + depth)")],
        _law("chain, warm") + _inspected("rejection, tree"),
    ),
    Mutant(
        "later drafts at temperature 1",
        [(_DRAFTER, "position, seeds, warm, beam", "position, seeds, torch.ones_like(warm), beam")],
        _law("chain, cold", "tree, cold"),
    ),
    Mutant(
        "a tree that goes by its drafts",
        [(_DRAFTER, "self._parents.repeat(size, 1), self._config",
          "torch.where(tokens == tokens[:, -1:], 0, self._parents.repeat(size, 1)), self._config")],
        _inspected("rejection, tree"),
    ),
    Mutant(
        "room that kept pages of the same prompt take",
        [(_PAGES, " - sum(not page.users for page in found)", "")],
        _HELD,
    ),
    Mutant(
        "pages that are known by one token after them",
        [(_PAGES, "(stop + prefix.ahead) * width", "(stop + min(prefix.ahead, 1)) * width")],
        [*_HELD, _SHARING + "trees_are_those_without_sharing[3 modules-4-7]"],
    ),
    Mutant(
        "pages that are read before the tokens after them are",
        [(_PAGES, "max(0, num_tokens + 1 - max(held.prefix.ahead, 1)) // self._page_size",
          "num_tokens // self._page_size")],
        [*_HELD, _SHARING + "modules_read_on_where_another_request_ends[3-1-1]"],
    ),
    Mutant(
        "all pages but the last are read by a first token",
        [(_PAGES, "max(0, num_tokens + 1 - max(held.prefix.ahead, 1)) //",
          "(num_tokens + 1 - max(held.prefix.ahead, 1)) //")],
        [*_HELD, _SHARING + "modules_read_on_where_another_request_ends[3-1-1]"],
    ),
    Mutant(
        "a share of a chunk that was evicted in part",
        [(_PAGES, "return num_tokens - num_tokens % held.prefix.unit", "return num_tokens")],
        _HELD + _ALL_SHARED,
    ),
    Mutant(
        "a prompt that is scored finds a part of a chunk",
        [(_READING, "most - most % unit", "most")],
        _HELD,
    ),
    Mutant(
        "the token before the first that is scored is shared",
        [(_READING, "max(first, 1) - 1 ", "max(first, 1) ")],
        [*_HELD, _SHARING + "scores_of_a_prompt_are_read_for"],
    ),
    Mutant(
        "keys of whatever draft has read",
        [(_READING, "(is_deterministic, reader and type(reader), ahead)", "(is_deterministic, ahead)")],
        [*_HELD, _SHARING + "drafts_keys_are_not_those_of_plain_decoding[draft_model]"],
    ),
    Mutant(
        "the first pages go before those that need them",
        [(_PAGES, "for page in reversed(held.shared):", "for page in held.shared:")],
        _HELD,
    ),
    Mutant(
        "a page with an unknown one above it",
        [(_PAGES, "this one may share less\n                break", "this one may share less\n                pass")],
        _HELD,
    ),
    Mutant(
        "a text that ends before the last string that it holds",
        [(_REQUEST, "whole[: min(found)] if found", "whole[: max(found)] if found")],
        [_STOPS],
    ),
    Mutant(
        "strings are searched as far back as the shortest is long",
        [(_REQUEST, "strings, max(map(len, strings))", "strings, min(map(len, strings))")],
        [_STOPS],
    ),
    Mutant(
        "text is held back for the shortest string",
        [(_REQUEST, "        begin = self._begin\n        named, spans = self._named(self.text, begin)",
          "        begin = max(0, len(self.text) - min(map(len, self._strings)) + 1)\n"
          "        named, spans = self._named(self.text, begin)")],
        [_STOPS],
    ),
    Mutant(
        "special tokens between words swallow a space",
        [(_DETOKENIZER, "self._pending += self._read_ids(token_ids)",
          "self._pending += list(token_ids)")],
        [_STOPS + "[in Python]"],
    ),
    Mutant(
        "special tokens are words without text",
        [(_DETOKENIZER, "[token for token in tokens if token is not None]",
          "[token or '' for token in tokens]")],
        [_STOPS],
    ),
    Mutant(
        "a character that the prompt began is lost",
        [(_DETOKENIZER, "whole[len(os.path.commonprefix([before, whole])) :]", "whole[len(before) :]")],
        [_STOPS + "[in Python]"],
    ),
    Mutant(
        "a least length that stays behind when its row moves",
        [(_ROWS, "self.output_counts, self.minimums]", "self.output_counts]")],
        [_BUSY, _MOVED],
    ),
    Mutant(
        "the state of a draft that stays behind when its row moves",
        [(ENGINE + "batch/state.py", "self.num_behind, self.draft_hidden]", "self.num_behind]")],
        [_BUSY, _MOVED],
    ),
    Mutant(
        "the method of a row's request before",
        [(ENGINE + "batch/state.py", "self.methods, self.history]", "self.history]")],
        [_BUSY + "[several methods]", _MOVED],
    ),
    Mutant(
        "counts of a row's request before",
        [(_ROWS, "            self.output_counts[row] = 0\n", "")],
        [_BUSY],
    ),
    Mutant(
        "first tokens with the scores of what end tokens were taken from",
        [(ENGINE + "step/stepper.py", "return _result(logits, torch.arange(", "return _result(kept, torch.arange(")],
        [_BUSY],
    ),
    Mutant(
        "samples of all prompts take turns at seeds",
        [(ENGINE + "requests/inputs.py", "for seed in seeds for sample in range(num_samples)]",
          "for sample in range(num_samples) for seed in seeds]")],
        [_ASKED + "samples_are_requests_with_the_seeds_that_follow[itself-3]"],
    ),
    Mutant(
        "likely tokens in whatever order torch.topk has them",
        [(ENGINE + "step/verification.py", "ids = order.topk(", "ids = logprobs.topk(")],
        [_ASKED + "of_equally_likely_tokens_the_lowest_ids_come_first", _ASKED + "likely_tokens_of_a_text_with_ties"],
    ),
    Mutant(
        "a mean of all step times there ever were",
        [(_CHOICE, "max(1 / self._num_timed[key], TIME_WEIGHT)", "1 / self._num_timed[key]")],
        [_CHOSEN + "what_becomes_worse_is_left_soon"],
    ),
    Mutant(
        "one step alone rules a tree out",
        [(_CHOICE, "if self._num_timed[key] > 1]", "if self._num_timed[key] > 0]")],
        [_CHOSEN + "one_busy_step_decides_nothing"],
    ),
    Mutant(
        "a busy step counts as it is",
        [(_CHOICE, "min(step_ms, OUTLIER * mean_ms), weight", "step_ms, weight")],
        [_CHOSEN + "one_busy_step_decides_nothing"],
    ),
    Mutant(
        "a small tree that has lost is never tried again",
        [(_CHOICE, "else self._num_unseen[key] + 1", "else self._num_unseen[key] + (number > 1)")],
        [_CHOSEN + "any_tree_may_become_the_best"],
    ),
    Mutant(
        "one GPU more than there is",
        [(RUNTIME + "placement.py", "(device.index or 0) < torch", "(device.index or 0) <= torch")],
        ["op_tests/tools/test_hostile_commands.py::test_gpus_are_numbered_from_0"],
    ),
    Mutant(
        "the first call to end restores how products are rounded",
        [(RUNTIME + "surroundings.py", "if self.within == 1:\n                for",
          "if self.within >= 1:\n                for")],
        ["op_tests/test_hostile_calls.py::test_products_are_whole_while_anyone_is_within"],
    ),
    Mutant(
        "letters that steps replace end a context",
        [(_DETOKENIZER, "each.isalnum() and each not in self.touched for", "each.isalnum() for")],
        ["op_tests/engine/test_tokenizer.py::test_pieces_of_chains_that_change_letters"],
    ),
    Mutant(
        "a tokenizer with the ids of the last model alone",
        [(_CHAT, "max(self.num_ids, num_ids)", "num_ids")],
        ["op_tests/engine/test_tokenizer.py::test_a_tokenizer_has_the_ids_of_every_model_that_it_was_given_to"],
    ),
    Mutant(
        "special_tokens_map.json beside added_tokens_decoder",
        [(_CHAT, '{} if "added_tokens_decoder" in config else read_json', "read_json")],
        _OF_FILES,
    ),
    Mutant(
        "tokenizer_config.json over special_tokens_map.json",
        [(_CHAT, "    named |= {name: mark for name, mark in older.items() if name in _STANDARD_MARKS}\n", "")],
        _OF_FILES,
    ),
    Mutant(
        "answers as if they followed their prompts",
        [(_GENERATE, "() if arguments.chat else request.prompt for", "request.prompt for")],
        ["op_tests/engine/test_tokenizer.py::test_the_command_tells_texts_as_they_are_decoded"],
    ),
    Mutant(
        "a comparison with other draws",
        [(_GENERATE, "arguments.max_new_tokens, seeds=stats.seeds", "arguments.max_new_tokens, seeds=arguments.seed")],
        ["op_tests/tools/test_cli.py::test_compare_draws_with_the_same_seeds"],
    ),
    Mutant(
        "shares of the batch's steps",
        [(_GENERATE, "count / max(1, stats.steps)", "count / max(1, stats.batch_steps)")],
        ["op_tests/tools/test_cli.py::test_the_table_shows_what_json_holds"],
    ),
    Mutant(
        "speed with the first tokens",
        [(ENGINE + "serve/output.py", "self.generated_tokens - self.num_requests", "self.generated_tokens")],
        ["op_tests/engine/serve/test_benchmark.py::test_figures_of_a_call"],
    ),
    Mutant(
        "times of phases by requests' steps",
        [(ENGINE + "benchmark.py", "timed_steps += timed.batch_steps", "timed_steps += timed.steps")],
        ["op_tests/engine/serve/test_benchmark.py::test_figures_of_several_batches"],
    ),
    Mutant(
        "drafts that shared rows left out count as verified",
        [(_SCHEDULER, ", stepper.mean_nodes - 1", ", stepper.num_nodes - 1")],
        [_STATISTICS + "[shared rows]"],
    ),
    Mutant(
        "a step counts by the tree of the step after it",
        [(_SCHEDULER, "stepper = self.plan.runners[number].stepper", "stepper = self.last_runner.stepper")],
        [_STATISTICS + "[table]"],
    ),
    Mutant(
        "a step of the most requests that have drafts has none",
        [(_CHOICE, "num_rows > self._most_rows:", "num_rows >= self._most_rows:")],
        [_CHOSEN + "limits_on_requests_hold_to_one_request[automatic-2]"],
    ),
    Mutant(
        "no limit on requests beside prompts",
        [(_CHOICE, "Fastest(self._most_tokens, self._most_rows, self._rows,",
          "Fastest(self._most_tokens, None, self._rows,")],
        [_CHOSEN + "limits_on_requests_hold_to_one_request[automatic-2]"],
    ),
    Mutant(
        "means of tokens over rows of other steps",
        [(_CHOICE, "(self._tokens, self._rows_seen))", "(self._tokens, Counter()))")],
        [_CHOSEN + "what_steps_with_and_without_prompts_tell_each_other"],
    ),
    Mutant(
        "a tree that does not fit is tried to the end",
        [(_CHOICE, "min(size, self._too_large.get(number, size)), None",
          "min(size, self._too_large.get(number, size)), self._probe")],
        [_CHOSEN + "nothing_is_chosen_that_was_given_up"],
    ),
    Mutant(
        "a position past the last one",
        [(ENGINE + "step/stepper.py", "clamp(max=self.target.max_length - 1)", "clamp(max=self.target.max_length)")],
        _LAST,
    ),
    Mutant(
        "a draft that catches up past its last position",
        [(ENGINE + "drafters/readers.py", "memory, model.max_length)", "memory, model.max_length + 9)")],
        _LAST,
    ),
    Mutant(
        "steps that were made for another call's phase_times",
        [(ENGINE + "serve/session.py", '"max_step_ms", "share_prefixes")',
          '"max_step_ms", "share_prefixes", "phase_times")')],
        [_OWN_VALUES + "[phase_times]"],
    ),
    Mutant(
        "pools that were made for another call's bytes",
        [(ENGINE + "serve/session.py", '("page_size", "max_batch", "kv_cache_bytes", ', '("page_size", "max_batch", ')],
        [_OWN_VALUES + "[kv_cache_bytes]"],
    ),
    Mutant(
        "a plain step's time is that of compiling it",
        [(_STREAM, 'self._times["batch_steps"] > self._times["cold_steps"]:', 'self._times["batch_steps"]:')],
        _TIMES,
    ),
    Mutant(
        "a sample's number in the place of its prompt's",
        [(_STREAM, "{self._first + index // self._num_samples}", "{self._first + index}")],
        _NUMBERS,
    ),
    Mutant(
        "a prompt's number in its batch",
        [(ENGINE + "benchmark.py", '"first": batch.start}', '"first": 0}')],
        _NUMBERS,
    ),
    Mutant(
        "0.29 * 100 drafts are 28 on the device",
        [(ENGINE + "drafters/suffix.py", "max_spec_factor + ROUNDING_UP", "max_spec_factor")],
        ["op_tests/engine/test_methods.py::test_any_factor_of_any_match_is_rounded_down_alike"],
    ),
    Mutant(
        "steps that read prompts are as good as others to the pace",
        [(_SCHEDULER, "note_step(None if launch.prompt_tokens else launch.step_ms)", "note_step(launch.step_ms)")],
        _JUDGES,
    ),
    Mutant(
        "reading in a step is taken for reading alone",
        [(_SCHEDULER, "pace.end(start, sum(num_read), is_joint=True)", "pace.end(start, sum(num_read))")],
        _JUDGES,
    ),
    Mutant(
        "trees of a table that nobody looks at",
        [(_PAIRING, "for tree in [config, *(tree for _, tree in config.trees if tree is not None)]:",
          "for tree in [config]:")],
        _TABLES,
    ),
    Mutant(
        "one's own width for all trees of a table",
        [(_PAIRING, "if tree.topk >= draft.draft_vocab_size:", "if config.topk >= draft.draft_vocab_size:")],
        _TABLES,
    ),
    Mutant(
        "a choice of trees wider than one's own",
        [(ENGINE + "config/eagle_config.py", "if tree[0] <= self.topk and levels", "if levels")],
        ["op_tests/engine/test_config.py::test_trees_of_an_automatic_choice"],
    ),
    Mutant(
        "all tokens of a round arrive one after another",
        [(ENGINE + "benchmark.py", "elapsed_s / count for", "elapsed_s for")],
        _LOAD,
    ),
    Mutant(
        "a lost tree is judged by the batch that it lost in alone",
        [(_CHOICE, "* 2 ** (size - fewer)", "* 2**size")],
        [_HISTORY + "what_is_chosen_follows_from_all_that_was_noted"],
    ),
    Mutant(
        "a budget that fits stays as it is where few tokens take as long as many",
        [(_READING, "next((budget for budget in self._budgets if budget > tokens), tokens)", "tokens")],
        [_HISTORY + "a_budget_follows_from_all_that_was_read"],
    ),
    Mutant(
        "first tokens are drawn without filters",
        [(ENGINE + "step/stepper.py", "params = state.sampling.arguments(features, rows)",
          "params = state.sampling.arguments(features._replace(filters=False), rows)")],
        [_BUSY],
    ),
    Mutant(
        "bytes that just suffice are refused",
        [(ENGINE + "serve/memory.py", 'sizes["rows"] > free', 'sizes["rows"] >= free')],
        [_LIMITS + "the_bytes_that_are_free_suffice"],
    ),
    Mutant(
        "the host waits for steps that are not done",
        [(_SCHEDULER, "while self._unread and self._unread[0].is_done:", "while self._unread:")],
        [_LIMITS + "what_is_done_is_read_and_nothing_is_waited_for"],
    ),
    Mutant(
        "tokens of a step by its rows, dead ones included",
        [(_SCHEDULER, "num_tokens / len(brought)", "num_tokens / most_rows")],
        [_LIMITS + "steps_are_noted_as_they_were"],
    ),
    Mutant(
        "a row that nobody has keeps its pages",
        [(ENGINE + "batch/state.py", "        self.block_table[row] = -1\n", "")],
        [_NEVER + "what_fails_leaves_nothing_behind"],
    ),
    Mutant(
        "who is given up stays in the line",
        [(_SCHEDULER, "                self._waiting.remove(request)\n", "                pass\n")],
        [_NEVER + "refused_calls_change_nothing"],
    ),
    Mutant(
        "suffix trees learn what came after the end",
        [(_SCHEDULER, "request.output_ids[num_known:])", "brought.tokens)")],
        [_NEVER + "suffix_trees_know_the_texts"],
    ),
    Mutant(
        "a benchmark compares batches by their prompts",
        [(ENGINE + "benchmark.py", "identical / len(batches)", "identical / len(prompts)")],
        ["op_tests/engine/serve/test_benchmark.py::test_a_benchmark_measures_what_its_clock_says"],
    ),
    Mutant(
        "scores of the first tokens that are scored at once alone",
        [(ENGINE + "serve/prompts.py", "zip(part.scored.split(256), after.split(256))",
          "zip(output.scored.split(256)[:1], after.split(256))")],
        [_ASKED + "scores_of_a_long_prompt"],
    ),
    Mutant(
        "as many prompts as one step reads are few",
        [(_READING, "len(unread) <= FEW_STEPS * MOST_PARTS", "len(unread) <= MOST_PARTS")],
        [_LIMITS + "few_steps_read_what_few_steps_can"],
    ),
    Mutant(
        "in a mixed batch path probabilities go to the rows of another method if an earlier method has none",
        [(ENGINE + "drafters/methods.py", "            for number, proposal in enumerate(proposals):\n",
          "            known = [each for each in proposals if each.path_probs is not None]\n"
          "            for number, proposal in enumerate(known):\n")],
        ["op_tests/engine/test_methods.py::test_a_row_of_a_mixed_batch_has_all_that_its_method_proposes"],
    ),
    Mutant(
        "tools that are None choose the template tool_use",
        [(_CHAT, '"tool_use" if variables.get("tools") is not None and', '"tool_use" if "tools" in variables and')],
        ["op_tests/engine/test_chat_template.py::"
         "test_tools_alone_choose_the_template_and_only_if_they_are_given"],
    ),
    Mutant(
        "ASCII trees explain the stop with characters that are not ASCII",
        [(TOOLS + "trees/text.py", "*wrapped(told(why(tree)), width)", "*wrapped(why(tree), width)")],
        ["op_tests/tools/test_tree_drawing.py::test_every_line_in_ascii_is_ascii"],
    ),
    Mutant(
        "log-probabilities are normalised in the model's dtype and widened afterwards",
        [(ENGINE + "step/verification.py", "torch.log_softmax(logits.float(), dim=-1)",
          "torch.log_softmax(logits, dim=-1).float()")],
        [_ASKED + "probabilities_of_half_precision_logits_are_not_rounded_to_it"],
    ),
    Mutant(
        "the default number of nodes ignores verify_strategy",
        [(ENGINE + "config/drafting_options.py", "method=method, verify_strategy=strategy)", "method=method)")],
        ["op_tests/engine/test_config.py::test_defaults_alone_make_a_tree_of_every_method_and_strategy"],
    ),
    Mutant(
        "a row keeps the drafting method of its former request",
        [(_SCHEDULER, "self.state.methods[index] = 0 if method is None else self.plan.methods.index(method)",
          "self.state.methods[index] = self.plan.methods.index(method) if method else self.state.methods[index]")],
        ["op_tests/engine/serve/test_scheduler.py::test_a_row_keeps_nothing_of_its_former_request"],
    ),
    Mutant(
        "room for the last tree of a table",
        [(ENGINE + "step/plan.py", "return max(runner.stepper.drafter.overshoot for runner in self.runners)",
          "return self.runners[-1].stepper.drafter.overshoot")],
        [_LIMITS + "the_largest_tree_of_a_table_has_room"],
    ),
    Mutant(
        "as many candidates as may be are too many",
        [(ENGINE + "step/verification.py", "torch.where(num_left > num_candidates",
          "torch.where(num_left >= num_candidates")],
        ["op_tests/engine/test_verify_strategies.py::test_candidates_of_topp"],
    ),
    Mutant(
        "a limit beside several params contradicts all or none",
        [(ENGINE + "requests/inputs.py", "if is_limited and any(each.max_new_tokens",
          "if is_limited and all(each.max_new_tokens")],
        ["op_tests/engine/test_names.py::test_a_limit_beside_params_is_that_of_each"],
    ),
    Mutant(
        "a request that a bar counts again",
        [(ENGINE + "generation.py", " and event.request not in ended:", ":")],
        ["op_tests/engine/serve/test_benchmark.py::test_a_bar_counts_what_has_ended"],
    ),
    Mutant(
        "a penalty below zero alone",
        [(ENGINE + "requests/sampling_params.py", "self.presence_penalty != 0", "self.presence_penalty > 0")],
        [_ASKED + "each_setting_has_its_effect_alone"],
    ),
    Mutant(
        "times of phases that grow with the steps that are timed",
        [(ENGINE + "step/phases.py", " / len(timed) * num_steps", "")],
        ["op_tests/engine/serve/test_benchmark.py::test_times_of_phases_are_those_of_the_steps_that_are_timed"],
    ),
    Mutant(
        "rows with room for the first tree of a table",
        [(ENGINE + "serve/session.py", "trees = [config, *(tree for _, tree in config.trees if tree is not None)]",
          "trees = [config]")],
        [_LIMITS + "requests_of_full_length_fit_with_the_deepest_tree"],
    ),
    Mutant(
        "a model's path in which token 0 is none",
        [(ENGINE + "drafters/ngram.py", "(path >= 0).sum(1)", "(path > 0).sum(1)")],
        ["op_tests/engine/test_hybrid.py::test_beside_a_path_that_is_only_known_by_itself"],
    ),
    Mutant(
        "later batches of a benchmark with the params of the first",
        [(ENGINE + "benchmark.py", "wanted[batch], config", "wanted, config")],
        ["op_tests/engine/serve/test_benchmark.py::test_each_prompt_of_a_benchmark_has_what_it_asks_for"],
    ),
    Mutant(
        "limits of typical acceptance in each other's place",
        [(ENGINE + "step/verification.py", "torch.full_like(temperature, self._config.typical_epsilon)",
          "torch.full_like(temperature, self._config.typical_delta)")],
        ["op_tests/engine/test_verify_strategies.py::test_typical_keeps_what_is_likely_enough"],
    ),
    Mutant(
        "prompts in the order of their rows",
        [(_SCHEDULER, "Row(request, pages, index, self._num_admitted)", "Row(request, pages, index, index)")],
        ["op_tests/engine/serve/test_scheduler.py::test_requests_have_their_turn_in_the_order_in_which_they_came"],
    ),
    Mutant(
        "texts compared that differ by design",
        [(ENGINE + "benchmark.py", "max(each.temperature for each in params)", "params[0].temperature")],
        ["op_tests/engine/serve/test_benchmark.py::test_texts_that_differ_by_design_are_not_compared"],
    ),
    Mutant(
        "chosen drafts as if they were drawn",
        [(ENGINE + "step/verification.py", "drawn_at, draft_logits = torch.zeros_like(temperature), logits",
          "draft_logits = logits")],
        ["op_tests/engine/test_verify_strategies.py::test_rejection_keeps_what_its_reference_keeps[chosen]"],
    ),
    Mutant(
        "pools kept whatever part of a prompt is read at once",
        [(ENGINE + "serve/session.py", '"kv_cache_bytes", "prefill_chunk")', '"kv_cache_bytes")')],
        [_OWN_VALUES + "[prefill_chunk]"],
    ),
    Mutant(
        "the scores that the first request asks for",
        [(_STREAM, "for name in {name: None for request in requests for name in request.params.scores}",
          "for name in requests[0].params.scores")],
        [_ASKED + "each_request_is_told_the_scores_that_it_asks_for"],
    ),
    Mutant(
        "fields read before the properties that fill them in",
        [(ENGINE + "serve/output.py", "for name in reversed(names)}", "for name in names}")],
        ["op_tests/engine/serve/test_benchmark.py::test_figures_of_a_call"],
    ),
    Mutant(
        "a lock without a limit",
        [(ENGINE + "serve/lock.py", "self._lock.acquire(blocking, timeout)", "self._lock.acquire(blocking)")],
        ["op_tests/engine/serve/test_lock.py::test_who_asks_for_the_lock_waits_as_long_as_they_say[limited]"],
    ),
    Mutant(
        "no plain step of a call that does not fit into the rows",
        [(ENGINE + "serve/plain_steps.py", "len(rows) == min(len(requests), state.num_rows)",
          "len(rows) == len(requests)")],
        [_PLAIN_STEPS],
    ),
    Mutant(
        "a timed step that may write past whole pages",
        [(ENGINE + "step/runner.py", "lengths // state.target_pool.page_size] = -1",
          "(lengths - 1) // state.target_pool.page_size] = -1")],
        [_PLAIN_STEPS],
    ),
    Mutant(
        "bytes of more rows with drafts than there are rows",
        [(ENGINE + "serve/memory.py", "min(rows, most), nodes, num_drafted", "most, nodes, num_drafted")],
        [_LIMITS + "the_bytes_of_the_largest_step_are_those_of_its_logits"],
    ),
]  # fmt: skip
