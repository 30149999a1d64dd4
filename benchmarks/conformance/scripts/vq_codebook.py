"""A vector-quantized autoencoder: nearest codes, codebook by moving averages, perplexity."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, commitment_cost=0.25, decay=0.9, epsilon=1e-5):
        super().__init__()
        self._embedding_dim, self._num_embeddings = embedding_dim, num_embeddings
        self._embedding = nn.Embedding(num_embeddings, embedding_dim)
        self._embedding.weight.data.normal_()
        self._embedding.weight.requires_grad_(False)
        self.register_buffer("_ema_cluster_size", torch.zeros(num_embeddings))
        self.register_buffer("_ema_w", self._embedding.weight.data.clone())
        self._commitment_cost, self._decay, self._epsilon = commitment_cost, decay, epsilon

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        input_shape = inputs.shape
        flat_input = inputs.view(-1, self._embedding_dim)
        distances = (
            torch.sum(flat_input**2, dim=1, keepdim=True)
            + torch.sum(self._embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat_input, self._embedding.weight.t())
        )
        encoding_indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(encoding_indices.shape[0], self._num_embeddings, device=inputs.device)
        encodings.scatter_(1, encoding_indices, 1)
        quantized = torch.matmul(encodings, self._embedding.weight).view(input_shape)
        if self.training:
            size = self._ema_cluster_size * self._decay + (1 - self._decay) * torch.sum(encodings, 0)
            n = torch.sum(size.data)
            self._ema_cluster_size = (size + self._epsilon) / (n + self._num_embeddings * self._epsilon) * n
            dw = torch.matmul(encodings.t(), flat_input).detach()
            self._ema_w = self._ema_w * self._decay + (1 - self._decay) * dw
            self._embedding.weight.data.copy_(self._ema_w / self._ema_cluster_size.unsqueeze(1))
        loss = self._commitment_cost * F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        avg_probs = torch.mean(encodings, dim=0)
        perplexity = torch.exp(-torch.sum(avg_probs * torch.log(avg_probs + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2).contiguous(), perplexity, encodings


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self._encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1))
        self._vq_vae = VectorQuantizerEMA(6, 4)
        self._decoder = nn.Sequential(nn.Conv2d(4, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, x):
        loss, quantized, perplexity, _ = self._vq_vae(self._encoder(x))
        return loss, self._decoder(quantized), perplexity


images = torch.randn(53, 3, 8, 8)
data_variance = images.var().item()
loader = DataLoader(TensorDataset(images), batch_size=13, shuffle=True)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, amsgrad=False)
train_res_recon_error, train_res_perplexity = [], []
for epoch in range(3):
    model.train()
    for (data,) in loader:
        optimizer.zero_grad()
        vq_loss, data_recon, perplexity = model(data)
        recon_error = F.mse_loss(data_recon, data) / data_variance
        loss = recon_error + vq_loss
        loss.backward()
        optimizer.step()
        train_res_recon_error.append(recon_error.item())
        train_res_perplexity.append(perplexity.item())
    recent = train_res_recon_error[-4:], train_res_perplexity[-4:]
    print(f"{epoch} recon_error: {sum(recent[0]) / 4:.10g} perplexity: {sum(recent[1]) / 4:.10g}")
model.eval()
with torch.no_grad():
    (valid,) = next(iter(loader))
    _, recon, perplexity = model(valid)
    print(f"valid {F.mse_loss(recon, valid).item():.10g} {perplexity.item():.10g}")
print(
    f"codebook {model._vq_vae._ema_w.norm().item():.10g} {model._vq_vae._ema_cluster_size.sum().item():.10g}"
)
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
