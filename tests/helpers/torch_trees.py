"""The tensors of the translators in PyTorch (scripts/bench/peers) as our parameters.

They have the same names and shapes, so that both networks compute the same. Tables and logits of
ours have a multiple of 128 rows; those beyond the vocabulary are no words.
"""

from typing import Any


def transformer(torch: Any, network: Any) -> Any:
    """The parameters of `torch_networks.transformer`."""
    rows = -len(network.table.weight) % 128
    tree = {"embedding": torch.nn.functional.pad(network.table.weight, (0, 0, 0, rows))}
    for side in ("encoder", "decoder"):
        layers = getattr(network.stacks, side)
        tree |= {f"{side}_{i}": _layer(layer) for i, layer in enumerate(layers.layers)}
        tree[f"{side}_norm"] = _norm(layers.norm)
    return tree


def gnmt(torch: Any, network: Any) -> Any:
    """The parameters of `torch_networks.gnmt`."""
    rows = (0, -len(network.table.weight) % 128)
    pad, attention = torch.nn.functional.pad, network.attention
    tree = {"embedding": pad(network.table.weight, (0, 0, *rows))}
    dense = _dense(network.classifier)
    tree["classifier"] = {name: pad(x, rows) for name, x in dense.items()}
    tree["attention"] = {
        "query": _dense(attention.query),
        "key": _dense(attention.key),
        "direction": attention.direction,
        "gain": attention.gain,
        "bias": attention.bias,
    }
    for side in ("encoder", "decoder"):
        for i, layer in enumerate(getattr(network, side)):
            tree[f"{side}_{i}"] = _lstm(torch, layer)
    return tree


def _dense(layer: Any, has_bias: bool = True) -> Any:
    kernel = {"kernel": layer.weight.T}
    return kernel | {"bias": layer.bias} if has_bias and layer.bias is not None else kernel


def _norm(layer: Any) -> Any:
    return {"scale": layer.weight, "bias": layer.bias}


def _layer(layer: Any) -> Any:
    """Our parameters of a layer of the Transformer's encoder or decoder."""
    attention, norms = layer.self_attn, [layer.norm1, layer.norm2]
    tree = {
        "attention": {
            "query_key_value": {"kernel": attention.in_proj_weight.T},
            "out": _dense(attention.out_proj, has_bias=False),  # as in our model
        },
        "mlp": {"in": _dense(layer.linear1), "out": _dense(layer.linear2)},
    }
    if hasattr(layer, "multihead_attn"):
        cross = layer.multihead_attn
        query, key_value = (x.T for x in cross.in_proj_weight.tensor_split([cross.embed_dim]))
        tree["cross_attention"] = {
            "query": {"kernel": query},
            "key_value": {"kernel": key_value},
            "out": _dense(cross.out_proj, has_bias=False),
        }
        tree["cross_norm"], norms = _norm(norms[1]), [norms[0], layer.norm3]
    return tree | {"attention_norm": _norm(norms[0]), "mlp_norm": _norm(norms[1])}


def _lstm(torch: Any, layer: Any) -> Any:
    """Our parameters of a layer, [directions, ...]; PyTorch has two biases, which are added."""
    rows = [weights[:4] for weights in layer.all_weights]
    kernel, recurrent, *biases = map(torch.stack, zip(*rows, strict=True))
    kernels = {"kernel": kernel.mT, "recurrent_kernel": recurrent.mT}
    return kernels | {"bias": biases[0] + biases[1]}
