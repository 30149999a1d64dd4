"""Fast style transfer: instance normalization, a frozen network of features, Gram matrices."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(42)


class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
        self.in1 = nn.InstanceNorm2d(6, affine=True)
        self.conv2 = nn.Conv2d(6, 8, 3, 2, 1)
        self.in2 = nn.InstanceNorm2d(8, affine=True)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        y = F.relu(self.in1(self.conv1(x)))
        y = F.relu(self.in2(self.conv2(y)))
        return self.out(F.interpolate(y, mode="nearest", scale_factor=2))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x):
        first = self.slice1(x)
        return first, self.slice2(first)


def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch.div_(255.0) - mean) / std


images = torch.rand(19, 3, 8, 8) * 255
loader = DataLoader(TensorDataset(images, torch.zeros(19)), batch_size=5)
transformer, vgg = TransformerNet(), Features()
optimizer = torch.optim.Adam(transformer.parameters(), 1e-3)
mse_loss = nn.MSELoss()
style = (torch.rand(1, 3, 8, 8) * 255).repeat(5, 1, 1, 1)
gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style))]
for e in range(2):
    transformer.train()
    agg_content_loss, agg_style_loss, count = 0.0, 0.0, 0
    for batch_id, (x, _) in enumerate(loader):
        n_batch = len(x)
        count += n_batch
        optimizer.zero_grad()
        y = transformer(x)
        y = normalize_batch(y)
        x = normalize_batch(x.clone())
        features_y, features_x = vgg(y), vgg(x)
        content_loss = 1e2 * mse_loss(features_y[1], features_x[1])
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            gm_y = gram_matrix(ft_y)
            style_loss += mse_loss(gm_y, gm_s[:n_batch, :, :])
        style_loss *= 1e3
        total_loss = content_loss + style_loss
        total_loss.backward()
        optimizer.step()
        agg_content_loss += content_loss.item()
        agg_style_loss += style_loss.item()
        if (batch_id + 1) % 2 == 0:
            print(
                f"Epoch {e + 1}:\t[{count}/{len(images)}]\tcontent: {agg_content_loss / (batch_id + 1):.10g}"
                f"\tstyle: {agg_style_loss / (batch_id + 1):.10g}"
            )
transformer.eval().cpu()
torch.save(transformer.state_dict(), "epoch.model")
with torch.no_grad():
    output = transformer(images[:1]).cpu()
print(f"picture {output[0].clone().clamp(0, 255).numpy().mean():.10g}")
print(f"norms {sum(p.norm() for p in transformer.parameters()):.10g}")
