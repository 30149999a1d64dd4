"""Domain adaptation: a gradient reversal function, binary weights by a straight-through function, two loaders."""

from itertools import cycle

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(99)


class ReverseLayerF(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class Binarize(Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.sign()

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[input.abs() > 1] = 0
        return grad_input


class BinaryLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.abs().mean(1, keepdim=True).detach()
        return nn.functional.linear(x, Binarize.apply(self.weight / scale) * scale, self.bias)


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Sequential()
        self.feature.add_module("f_fc1", nn.Linear(6, 16))
        self.feature.add_module("f_bn1", nn.BatchNorm1d(16))
        self.feature.add_module("f_relu1", nn.ReLU(True))
        self.feature.add_module("f_fc2", BinaryLinear(16, 12))
        self.class_classifier = nn.Sequential(nn.Linear(12, 3), nn.LogSoftmax(dim=1))
        self.domain_classifier = nn.Sequential(
            nn.Linear(12, 8), nn.ReLU(True), nn.Linear(8, 2), nn.LogSoftmax(dim=1)
        )

    def forward(self, input_data, alpha):
        feature = self.feature(input_data)
        reverse_feature = ReverseLayerF.apply(feature, alpha)
        return self.class_classifier(feature), self.domain_classifier(reverse_feature)


def make(n, shift):
    x = torch.randn(n, 6)
    return TensorDataset(x + shift, x[:, :3].argmax(1))


def test(model, loader):
    model = model.eval()
    n_correct = n_total = 0
    matrix = torch.zeros(3, 3, dtype=torch.int64)
    for t_img, t_label in loader:
        class_output, _ = model(input_data=t_img, alpha=0)
        pred = class_output.data.max(1, keepdim=True)[1]
        n_correct += pred.eq(t_label.data.view_as(pred)).cpu().sum()
        n_total += len(t_label)
        matrix += torch.bincount(t_label * 3 + pred.view(-1), minlength=9).view(3, 3)
    return n_correct.data.numpy() * 1.0 / n_total, matrix


source = DataLoader(make(60, 0.0), batch_size=11, shuffle=True)
target = DataLoader(make(35, 0.7), batch_size=8, shuffle=True)
model = DANN()
optimizer = torch.optim.Adam(
    [{"params": [p for n, p in model.named_parameters() if "domain" in n], "lr": 2e-3},
     {"params": [p for n, p in model.named_parameters() if "domain" not in n], "lr": 1e-3}]
)  # fmt: skip
loss_class, loss_domain = nn.NLLLoss(), nn.NLLLoss()
n_epoch = 4
for epoch in range(n_epoch):
    model.train()
    for i, ((s_img, s_label), (t_img, _)) in enumerate(zip(source, cycle(target))):
        p = float(i + epoch * len(source)) / n_epoch / len(source)
        alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
        model.zero_grad()
        class_output, domain_output = model(input_data=s_img, alpha=alpha)
        err_s_label = loss_class(class_output, s_label)
        err_s_domain = loss_domain(domain_output, torch.zeros(len(s_label)).long())
        _, domain_output = model(input_data=t_img, alpha=alpha)
        err_t_domain = loss_domain(domain_output, torch.ones(len(t_img)).long())
        err = err_t_domain + err_s_domain + err_s_label
        err.backward()
        optimizer.step()
        if i % 2 == 0:
            print(
                "epoch %d [%d/%d] label %.10f source %.10f target %.10f"
                % (
                    epoch, i + 1, len(source), err_s_label.data.cpu().numpy(),
                    err_s_domain.data.cpu().numpy(), err_t_domain.data.cpu().item(),
                )
            )  # fmt: skip
    for name, loader in {"source": source, "target": target}.items():
        accuracy, matrix = test(model, loader)
        print(f"  {name} {accuracy:.10g} {matrix.tolist()}")
both = DataLoader(torch.utils.data.ConcatDataset([source.dataset, target.dataset]), 16)
features = np.vstack([model.feature(x).detach().numpy() for x, _ in both])
print(f"features {features.mean():.10g} {np.linalg.norm(features - features.mean(0)):.10g}")
