"""Style transfer by optimizing a picture: loss modules between layers of a frozen network, L-BFGS, TV loss."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


class StyleLoss(nn.Module):
    def __init__(self, target_feature):
        super().__init__()
        self.target = gram_matrix(target_feature).detach()

    def forward(self, input):
        self.loss = F.mse_loss(gram_matrix(input), self.target)
        return input


class Normalization(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def forward(self, img):
        return (img - self.mean) / self.std


def losses_of(cnn, style_img, content_img):
    model = nn.Sequential(Normalization(torch.tensor([0.48, 0.45, 0.4]), torch.tensor([0.23, 0.22, 0.22])))
    contents, styles, i = [], [], 0
    for layer in copy.deepcopy(cnn).children():
        if isinstance(layer, nn.Conv2d):
            i += 1
            name = f"conv_{i}"
        elif isinstance(layer, nn.ReLU):
            name, layer = f"relu_{i}", nn.ReLU(inplace=False)
        else:
            name = f"pool_{i}"
        model.add_module(name, layer)
        if name == "conv_3":
            contents.append(ContentLoss(model(content_img).detach()))
            model.add_module(f"content_loss_{i}", contents[-1])
        if isinstance(layer, nn.Conv2d):
            styles.append(StyleLoss(model(style_img).detach()))
            model.add_module(f"style_loss_{i}", styles[-1])
    return model, styles, contents


cnn = nn.Sequential(
    nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1),
).eval()  # fmt: skip
content_img, style_img = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)
input_img = content_img.clone()
model, style_losses, content_losses = losses_of(cnn, style_img, content_img)
input_img.requires_grad_(True)
model.requires_grad_(False)
optimizer = optim.LBFGS([input_img], max_iter=5)
run = [0]
while run[0] <= 15:

    def closure():
        with torch.no_grad():
            input_img.clamp_(0, 1)
        optimizer.zero_grad()
        model(input_img)
        style_score = sum(sl.loss for sl in style_losses) * 1e4
        content_score = sum(cl.loss for cl in content_losses)
        smooth = (input_img[..., 1:] - input_img[..., :-1]).abs().mean()
        loss = style_score + content_score + 0.1 * smooth
        loss.backward()
        run[0] += 1
        if run[0] % 4 == 0:
            print(f"run {run} style {style_score.item():.9g} content {content_score.item():.9g}")
        return style_score + content_score

    optimizer.step(closure)
with torch.no_grad():
    input_img.clamp_(0, 1)
print(f"picture {input_img.mean().item():.9g} {input_img.std().item():.9g}")
# several pictures at once by Adam: the batch is the parameter
batch = torch.rand(5, 3, 16, 16, requires_grad=True)
adam = optim.Adam([batch], lr=0.05)
for step in range(4):
    adam.zero_grad(set_to_none=True)
    features = cnn(batch)
    loss = F.mse_loss(features, cnn(content_img).expand_as(features)) + batch.var(0).mean()
    loss.backward()
    adam.step()
    batch.data.clamp_(0, 1)
    print(f"batch {step} {loss.item():.9g} gradient {batch.grad.norm().item():.9g}")
