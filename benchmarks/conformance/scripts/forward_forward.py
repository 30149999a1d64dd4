"""Forward-forward: each layer learns by itself from good and bad data, without a backward through the network."""

import torch
import torch.nn as nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(1234)


def overlay_y_on_x(x, y, classes=5):
    x_ = x.clone()
    x_[:, :classes] *= 0.0
    x_[range(x.shape[0]), y] = x_.max()
    return x_


class Layer(nn.Linear):
    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.relu = torch.nn.ReLU()
        self.opt = Adam(self.parameters(), lr=0.03)
        self.threshold, self.num_epochs, self.history = 1.0, 4, []

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def goodness(self, x):
        return self.forward(x).pow(2).mean(1)

    def train_layer(self, x_pos, x_neg):
        for _ in range(self.num_epochs):
            g_pos, g_neg = self.goodness(x_pos), self.goodness(x_neg)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.history.append(loss)
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(torch.nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = []
        for d in range(len(dims) - 1):
            self.layers += [Layer(dims[d], dims[d + 1])]

    def predict(self, x, classes=5):
        goodness_per_label = []
        for label in range(classes):
            h = overlay_y_on_x(x, label)
            goodness = []
            for layer in self.layers:
                h = layer(h)
                goodness += [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        goodness_per_label = torch.cat(goodness_per_label, 1)
        return goodness_per_label.argmax(1), goodness_per_label

    def train_net(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for layer in self.layers:
            h_pos, h_neg = layer.train_layer(h_pos, h_neg)
        return h_pos, h_neg


y = torch.randint(5, (59,))
x = torch.rand(5, 24)[y] + 0.3 * torch.rand(59, 24)
train_loader = DataLoader(TensorDataset(x[:43], y[:43]), batch_size=19, shuffle=True)
test_loader = DataLoader(TensorDataset(x[43:], y[43:]), batch_size=16, shuffle=False)
net = Net([24, 20, 15, 10])
assert not list(net.parameters())
for x, y in train_loader:
    x_pos = overlay_y_on_x(x, y)
    y_neg = y.clone()
    for idx, y_samp in enumerate(y):
        allowed = [c for c in range(5) if c != y_samp.item()]
        y_neg[idx] = torch.tensor(allowed)[torch.randint(4, size=(1,)).item()].item()
    x_neg = overlay_y_on_x(x, y_neg)
    h_pos, h_neg = net.train_net(x_pos, x_neg)
    print(f"hidden {h_pos.norm():.10g} {h_neg.norm():.10g} labels {int(y_neg.sum())}")
    guesses, _ = net.predict(x)
    print("train error:", 1.0 - guesses.eq(y).float().mean().item())
for i, layer in enumerate(net.layers):
    print(f"layer {i}", " ".join(f"{loss.item():.10g}" for loss in layer.history[::5]), f"{layer.weight.norm().item():.10g}")
x_te, y_te = next(iter(test_loader))
guesses, table = net.predict(x_te)
print("test error:", 1.0 - guesses.eq(y_te).float().mean().item(), f"{table.std().item():.10g}")


class HebbianHead(nn.Module):
    """Perturbed by hand: feedback alignment with a fixed matrix, without autograd."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(24, 12) * 0.1), nn.Parameter(torch.randn(12, 5) * 0.1)
        self.register_buffer("feedback", torch.randn(5, 12) * 0.3)

    @torch.no_grad()
    def learn(self, x, y, lr=0.3):
        hidden = (x @ self.w1).sigmoid()
        error = torch.softmax(hidden @ self.w2, 1)
        loss = -error[torch.arange(len(y)), y].log().mean()
        error[torch.arange(len(y)), y] -= 1
        back = (error @ self.feedback) * hidden * (1 - hidden)
        self.w2 -= lr * hidden.T @ error / len(x)
        self.w1.data -= lr * torch.einsum("bi,bj->ij", x, back) / len(x)
        return loss


head = HebbianHead()
for epoch in range(3):
    losses = [head.learn(x, y).item() * len(x) for x, y in train_loader]
    print(f"feedback {epoch} {sum(losses) / 43:.10g}")
print(f"norms {head.w1.norm().item():.10g} {head.w2.norm().item():.10g}")
