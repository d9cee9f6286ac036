"""Writes tests/fixtures/losses.json: losses and gradients by PyTorch autograd and TRL.

Run it with a Python that has torch:  python crates/core/tests/python/loss_fixtures.py

TRL keeps its formulas inside training steps, where they cannot be called alone;
they are written out here in its terms (version 1.16: `GRPOTrainer._compute_loss`
for the clipped surrogate with its k3 penalty, `DPOTrainer._compute_loss`,
`KTOTrainer._compute_loss`, and the group advantages of GRPO and RLOO), and
differentiated by autograd.
"""

import json
import pathlib

import torch

torch.manual_seed(20251201)
torch.set_default_dtype(torch.float64)
CLIP_LOW, CLIP_HIGH, DUAL, CAP = 0.2, 0.28, 3.0, 2.0


def leaf(values):
    return torch.tensor(values, requires_grad=True)


def policy_case(new, old, behaviour, advantage):
    new = leaf(new)
    old, behaviour = torch.tensor(old), torch.tensor(behaviour)
    weights = torch.exp(old - behaviour).clamp(max=CAP)
    ratio = torch.exp(new - old)
    loss = torch.maximum(
        -advantage * ratio, -advantage * torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    )
    if advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-DUAL * advantage))
    value = (weights * loss).mean()
    value.backward()
    return {
        "new": new.tolist(), "old": old.tolist(), "behaviour": behaviour.tolist(),
        "advantage": advantage, "weights": weights.tolist(),
        "loss": value.item(), "gradient": new.grad.tolist(),
    }


def k3_case(new, reference):
    new, reference = leaf(new), torch.tensor(reference)
    # As in trl/trainer/grpo_trainer.py.
    value = (torch.exp(reference - new) - (reference - new) - 1).mean()
    value.backward()
    return {"new": new.tolist(), "reference": reference.tolist(),
            "value": value.item(), "gradient": new.grad.tolist()}


def value_case(value, old, target, clip):
    v = leaf(value)
    cut = torch.clamp(v, old - clip, old + clip)
    loss = 0.5 * torch.maximum((v - target) ** 2, (cut - target) ** 2)
    loss.backward()
    return {"value": value, "old": old, "target": target, "clip": clip,
            "loss": loss.item(), "gradient": v.grad.item()}


def dpo_case(chosen, chosen_ref, rejected, rejected_ref, beta, nll_weight):
    c, r = leaf(chosen), leaf(rejected)
    cr, rr = torch.tensor(chosen_ref), torch.tensor(rejected_ref)
    margin = beta * ((c.sum() - cr.sum()) - (r.sum() - rr.sum()))
    plain = -torch.nn.functional.logsigmoid(margin)
    loss = plain + nll_weight * -c.mean()
    loss.backward()
    return {"chosen": chosen, "chosen_reference": chosen_ref, "rejected": rejected,
            "rejected_reference": rejected_ref, "beta": beta, "nll_weight": nll_weight,
            "loss": loss.item(), "margin": margin.item(),
            "chosen_gradient": c.grad.tolist(), "rejected_gradient": r.grad.tolist()}


def kto_case(new, reference, liked, kl, beta, desirable, undesirable):
    n, ref = leaf(new), torch.tensor(reference)
    ratio = n.sum() - ref.sum()
    if liked:
        loss = desirable * (1 - torch.sigmoid(beta * (ratio - kl)))
    else:
        loss = undesirable * (1 - torch.sigmoid(beta * (kl - ratio)))
    loss.backward()
    return {"new": n.detach().tolist(), "reference": reference, "liked": liked, "kl": kl, "beta": beta,
            "desirable_weight": desirable, "undesirable_weight": undesirable,
            "loss": loss.item(), "gradient": n.grad.tolist()}


def group_case(rewards):
    r = torch.tensor(rewards)
    n = len(rewards)
    # trl/trainer/grpo_trainer.py and rloo_trainer.py.
    grpo = (r - r.mean()) / (r.std() + 1e-4)
    rloo = r - (r.sum() - r) / (n - 1)
    return {"rewards": rewards, "grpo": grpo.tolist(), "rloo": rloo.tolist()}


def uniform(n, low=-4.0, high=-0.05):
    return (torch.rand(n) * (high - low) + low).tolist()


def near(values, width):
    return [min(-1e-3, v + (torch.rand(1).item() * 2 - 1) * width) for v in values]


policy = []
for advantage in (1.0, -1.0, 0.35, -1.9):
    for width in (0.05, 0.4, 3.0):  # No clip, both clips, dual clip.
        old = uniform(9)
        policy.append(policy_case(near(old, width), old, near(old, 1.2), advantage))
data = {
    "clip": {"low": CLIP_LOW, "high": CLIP_HIGH, "dual": DUAL, "cap": CAP},
    "policy": policy,
    "k3": [k3_case(near(r, w), r) for w in (0.01, 0.5, 2.0) for r in [uniform(7)]],
    "value": [value_case(*c) for c in
              ((0.1, 0.0, 1.0, 0.2), (0.5, 0.0, 1.0, 0.2), (0.5, 0.0, -1.0, 0.2),
               (-0.6, 0.0, -1.0, 0.2), (-0.6, 0.0, 0.9, 0.2))],
    "dpo": [dpo_case(near(c, w), c, near(r, w), r, beta, nll)
            for w in (0.0, 0.5, 2.0) for beta in (0.1, 0.5) for nll in (0.0, 0.2)
            for c, r in [(uniform(6), uniform(11))]],
    "kto": [kto_case(near(c, w), c, liked, kl, 0.1, 1.0, 1.33)
            for w in (0.2, 2.0) for liked in (True, False) for kl in (0.0, 1.7)
            for c in [uniform(8)]],
    "groups": [group_case(r) for r in
               ([1.0, -1.0, 0.5, 0.0, 1.0], [1.0, 1.0, 1.0], [-1.0, 1.0])],
}
path = pathlib.Path(__file__).parent.parent / "fixtures" / "losses.json"
path.write_text(json.dumps(data, indent=1) + "\n")
print("wrote", path.name)
