"""Small models: fake quantization by observers and straight-through steps, pruning that is iterated, distilled, traced."""

import copy
import io

import torch
import torch.nn.utils.prune as prune
from torch import fx, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, PerChannelMinMaxObserver
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(70)


class RoundSTE(Function):
    @staticmethod
    def forward(ctx, x, step, bits):
        levels = 2 ** (bits - 1) - 1
        scaled = x / step
        ctx.save_for_backward(scaled)
        ctx.levels = levels
        return scaled.round().clamp(-levels - 1, levels) * step

    @staticmethod
    def backward(ctx, grad):
        (scaled,) = ctx.saved_tensors
        inside = (scaled >= -ctx.levels - 1) & (scaled <= ctx.levels)
        slope = torch.where(inside, scaled.round() - scaled, scaled.sign() * ctx.levels)
        return grad * inside, (grad * slope).sum().view(1) * (grad.numel() * ctx.levels) ** -0.5, None


class QuantLinear(nn.Linear):
    """A learned step size for weights and one for activations, started from the first batch."""

    def __init__(self, *args, bits=4, **kwargs):
        super().__init__(*args, **kwargs)
        self.bits = bits
        self.step_w = nn.Parameter(2 * self.weight.detach().abs().mean().view(1) / 7**0.5)
        self.step_x = nn.Parameter(torch.ones(1))
        self.register_buffer("started", torch.zeros(1, dtype=torch.uint8))

    def forward(self, x):
        if self.training and self.started == 0:
            self.step_x.data.copy_(2 * x.detach().abs().mean() / 7**0.5)
            self.started.fill_(1)
        return F.linear(RoundSTE.apply(x, self.step_x, self.bits), RoundSTE.apply(self.weight, self.step_w, self.bits), self.bias)


class QuantConv(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv
        self.weight_fake = FakeQuantize(PerChannelMinMaxObserver, -127, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0)
        self.act_fake = FakeQuantize(MovingAverageMinMaxObserver, 0, 255, dtype=torch.quint8, averaging_constant=0.1)

    def forward(self, x):
        weight = self.weight_fake(self.conv.weight.float()).double()
        return self.act_fake(F.relu(F.conv2d(x, weight, self.conv.bias, padding=1)).float()).double()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc1, self.fc2 = nn.Linear(54, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


labels = torch.randint(4, (63,))
images = torch.randn(4, 2, 6, 6)[labels] + 0.8 * torch.randn(63, 2, 6, 6)
train = DataLoader(TensorDataset(images[:47], labels[:47]), 9, shuffle=True)
test = DataLoader(TensorDataset(images[47:], labels[47:]), 7)


def fit(model, epochs, lr=0.05, teacher=None, after=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.9)
    for _ in range(epochs):
        model.train()
        for x, y in train:
            out = model(x)
            loss = F.cross_entropy(out, y)
            if teacher is not None:
                with torch.no_grad():
                    soft = F.softmax(teacher(x) / 2, 1)
                loss = 0.5 * loss + 2 * F.kl_div(F.log_softmax(out / 2, 1), soft, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if after:
                after()
    return loss.item()


@torch.no_grad()
def score(model):
    model.eval()
    total = [(F.cross_entropy(model(x), y, reduction="sum"), (model(x).argmax(1) == y).sum()) for x, y in test]
    return f"test {sum(t[0] for t in total).item() / 16:.10g} right {sum(t[1] for t in total)}"


def sparsity(model):
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    zeros = sum(int((m.weight == 0).sum()) for m in layers)
    return zeros / sum(m.weight.numel() for m in layers)


dense = Net()
print(f"dense {fit(dense, 3):.10g}", score(dense))
pruned = copy.deepcopy(dense)
targets = [(pruned.conv, "weight"), (pruned.fc1, "weight"), (pruned.fc2, "weight")]
for amount in (0.3, 0.3):
    prune.global_unstructured(targets, pruning_method=prune.L1Unstructured, amount=amount)
    print(f"pruned {fit(pruned, 1, 0.02, teacher=dense):.10g} {sparsity(pruned):.6f}", score(pruned))
prune.ln_structured(pruned.fc1, "weight", amount=0.25, n=2, dim=0)
prune.random_unstructured(pruned.fc2, "bias", amount=1)
print("buffers", *sorted(name for name, _ in pruned.named_buffers() if "mask" in name), prune.is_pruned(pruned))
for module, name in targets:
    prune.remove(module, name)
masks = {n: (p != 0) for n, p in pruned.named_parameters()}


def keep_zeros():
    with torch.no_grad():
        for n, p in pruned.named_parameters():
            p.mul_(masks.get(n, 1))


print(f"kept {fit(pruned, 1, 0.02, after=keep_zeros):.10g} {sparsity(pruned):.6f}", score(pruned))
learned = copy.deepcopy(dense)
for name in ("fc1", "fc2"):
    old = getattr(learned, name)
    new = QuantLinear(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict(), strict=False)
    setattr(learned, name, new)
print(f"steps {fit(learned, 2, 0.01):.10g} {learned.fc1.step_x.item():.10g} {learned.fc2.step_w.item():.10g}", score(learned))
with torch.no_grad():
    fused = nn.utils.fuse_conv_bn_eval(copy.deepcopy(dense.conv).eval(), copy.deepcopy(dense.bn).eval())
observed = copy.deepcopy(dense)
observed.conv, observed.bn = QuantConv(fused), nn.Identity()
loss = fit(observed, 1, 0.01)
observed.conv.apply(torch.ao.quantization.disable_observer)
scale = observed.conv.act_fake.scale.item()
print(f"fake {loss:.6g} scale {scale:.6g} {observed.conv.weight_fake.scale.sum().item():.6g}", score(observed)[:12])
graph = fx.symbolic_trace(dense.eval())
print("fx", sum(node.op == "call_module" for node in graph.graph.nodes), score(graph))
buffer = io.BytesIO()
torch.jit.save(torch.jit.trace(dense, images[:2]), buffer)
buffer.seek(0)
print("traced", score(torch.jit.load(buffer)))
quantiles = torch.quantile(torch.cat([dense(x).detach().flatten() for x, _ in test]), torch.tensor([0.1, 0.5, 0.9]))
print("quantiles", " ".join(f"{q:.10g}" for q in quantiles.tolist()))
