"""Bugs of models, of drafters on the host, of examples and of tools."""

from __future__ import annotations

from .mutant import ATTEND, ENGINE, INTEGRATIONS, TOOLS, bug

_MODELS = ENGINE + "models/"
_DRAFTERS = ENGINE + "drafters/"
_FORMULA = "op_tests/engine/test_decoder_formula.py::test_"

MUTANTS = [
    bug("long waves by the bound of short ones", _MODELS + "layers/rotary.py",
        "is_long = wavelengths > length / low", "is_long = wavelengths > length / high",
        _FORMULA + "a_decoder_is_the_formula[llama, llama3]"),
    bug("a window of one key more without a pool", ATTEND,
        "(distance < (len", "(distance <= (len", _FORMULA + "attention_without_a_pool"),
    bug("transformers' soft caps passed over", _MODELS + "transformers_target.py",
        '"soft_cap": "softcap", ', "",
        "op_tests/engine/test_transformers_stand_in.py::test_logits_and_streams_are_the_model_s_own"),
    bug("a state whose first next token is one of several", _DRAFTERS + "suffix_automaton.py",
        "                if not best:", "                if False:",
        "op_tests/engine/drafters/test_suffix_automaton.py::test_an_automaton_holds_its_texts_and_nothing_else"),
    bug("bounds of drafts that leave the path at its end", _DRAFTERS + "suffix_drafts.py",
        "sum_counts += aside * (first + most - end)", "sum_counts += aside * (last - end)",
        "op_tests/engine/drafters/test_suffix_cache.py::test_equals_the_definition"),
    bug("the probability of a drawn draft without those above it", _DRAFTERS + "model_drafter.py",
        "probs[:, first:last] *= probs[:, first - topk : last - topk]", "pass",
        "op_tests/tools/test_tree_view.py::test_draft_probabilities_are_those_of_the_model[drawn]"),
    bug("pages for one row alone", "eagle_kernels/examples/mini_engine.py",
        "num_rows * most_pages if num_pages", "most_pages if num_pages",
        "op_tests/test_examples.py::test_the_small_engine_keeps_account[2-None]"),
    bug("paths of requests that are not in the batch", INTEGRATIONS + "sglang_cache_locs.py",
        "accept_index.view(1, -1)[:, :size]", "accept_index.view(1, -1)",
        "op_tests/integrations/test_sglang_cache_locs.py::test_what_lies_behind_a_batch_is_neither_read_nor_written"),
    bug("drafts whose third level is their second", INTEGRATIONS + "sglang/drafting.py",
        "topk=topk, level=step + 1,", "topk=topk, level=step or 1,",
        "op_tests/integrations/test_sglang_steps.py::test_drafts_are_those_of_sglang"),
    bug("a column of boxes as wide as its narrowest text", TOOLS + "trees/svg.py",
        "widest = max(num_columns(", "widest = min(num_columns(",
        "op_tests/tools/test_tree_drawing.py::test_where_boxes_edges_and_numbers_of_an_svg_are"),
    bug("layers that do not fit are measured", TOOLS + "inspection.py",
        "if not head.misfits(target):", "if head.aux_layers:",
        "op_tests/tools/test_inspection.py::test_a_sweep_measures_what_fits_and_changes_nothing"),
    bug("JSON in a prompt is ASCII", _MODELS + "chat_template.py",
        "ensure_ascii: bool = False", "ensure_ascii: bool = True",
        "op_tests/engine/test_chat_template.py::test_json_in_a_prompt_is_that_of_python"),
    bug("keys that are stored without their bias", _MODELS + "layers/linear.py",
        "None if bias is None else bias[skipped:]", "None",
        "op_tests/engine/test_layers.py::test_a_head_stores_the_keys_and_values_that_it_attends_to"),
    bug("the length inside the rotary section counts", _MODELS + "layers/rotary.py",
        "[item.name for item in fields(cls)]) | present(config, [length])",
        "[length]) | present(config, [length]) | present(section, [item.name for item in fields(cls)])",
        "op_tests/engine/test_decoder_config.py::test_of_both_places_of_a_rotary_parameter_one_counts"),
    bug("the caller's tokenizer loses its padding", _MODELS + "tokenizer.py",
        "FileTokenizer(_copy(tokenizer), ", "FileTokenizer(tokenizer, ",
        "op_tests/engine/test_tokenizer.py::test_a_tokenizer_stays_what_it_was_and_so_does_the_engine_s"),
    bug("a timer that is used again can be read while it runs", TOOLS + "measure.py",
        "        self._end = None\n        self._start = self._now()", "        self._start = self._now()",
        "op_tests/lab/test_timing.py::test_a_timer_that_is_used_again_is_as_new"),
    bug("probabilities of shown trees without min_p", TOOLS + "trees/view.py",
        ', (ops.min_p_renorm, "min_p"))', ")",
        "op_tests/tools/test_tree_view.py::test_target_probabilities_are_those_of_the_law"),
]  # fmt: skip
