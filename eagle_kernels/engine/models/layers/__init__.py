"""What decoder layers are made of, a kind a file. `decoder_config.FAMILIES` chooses the kinds, `decoder.DecoderLayer`
and the layers of draft heads join them.

An attention (`grouped_query.py`) and a feed-forward (`gated.py`) are two classes each. The first holds settings:

    read(config, ..)       takes them from a config.json, and refuses by name what is not implemented
    make(layer)            makes the module of one layer
    stored_sizes           which of them the tensors of a layer tell as well, by the names of these tensors
    kv_shape, rotary_size  of an attention: the memory that tokens take, and the part of a head that turns

The second is the module: `forward(x, angles, attend, layer, in_parts)` of an attention, and `store` where draft heads
use it; `forward(x, in_parts, deterministic)` of a feed-forward. Its parameters have the published names.

A linear (`linear.py`) is one class, with the arguments of `Linear` and of its `forward`. The other kinds multiply by it
alone and read none of its weights. Its state dict has the names, shapes and types that a checkpoint has, and is where
the checkpoint's tensors are copied to. In a model whose weights are quantised, `quantised.py` takes the place of those
of the kind `Linear` (`models/quantised_linears.py`).
"""
