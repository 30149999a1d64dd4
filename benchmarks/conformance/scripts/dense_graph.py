"""Node classification on one graph: sparse and dense adjacency, attention, masks of nodes, early stopping."""

import time

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
np.random.seed(72)
torch.manual_seed(72)


def normalize(mx):
    rowsum = np.array(mx.sum(1))
    r_inv = np.power(rowsum, -1).flatten()
    r_inv[np.isinf(r_inv)] = 0.0
    return sp.diags(r_inv).dot(mx)


def sparse_mx_to_torch_sparse_tensor(sparse_mx):
    sparse_mx = sparse_mx.tocoo()
    indices = torch.from_numpy(np.vstack((sparse_mx.row, sparse_mx.col)).astype(np.int64))
    return torch.sparse_coo_tensor(indices, torch.from_numpy(sparse_mx.data), torch.Size(sparse_mx.shape))


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        return (torch.spmm(adj, support) if adj.is_sparse else adj @ support) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(nfeat, nhid), GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.w, self.out = nn.Linear(nfeat, nhid, bias=False), nn.Linear(nhid, nclass)
        self.a = nn.Parameter(torch.randn(2 * nhid, 1) * 0.1)
        self.dropout, self.nhid = dropout, nhid

    def forward(self, x, adj):
        h = self.w(F.dropout(x, self.dropout, training=self.training))
        e = F.leaky_relu(h @ self.a[: self.nhid] + (h @ self.a[self.nhid :]).T, 0.2)
        attention = F.softmax(torch.where(adj > 0, e, -9e15 * torch.ones_like(e)), dim=1)
        return F.log_softmax(self.out(F.elu(attention @ h)), dim=1)


def accuracy(output, labels):
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().sum() / len(labels)


nodes, classes = 53, 3
labels = torch.from_numpy(np.random.randint(0, classes, nodes))
near = (labels[:, None] == labels[None]).numpy()
edges = np.triu(np.random.rand(nodes, nodes) < np.where(near, 0.15, 0.04), 1)
adj = sp.coo_matrix(edges + edges.T, dtype=np.float64)
features = torch.from_numpy(
    normalize(sp.csr_matrix(np.random.rand(nodes, 11) < 0.3, dtype=np.float64)).toarray()
)
features += 0.1 * F.one_hot(labels, 11)
sparse = sparse_mx_to_torch_sparse_tensor(normalize(adj + sp.eye(nodes)))
idx_train, idx_val, idx_test = torch.arange(20), torch.arange(20, 33), torch.arange(33, nodes)
for name, model, graph in [
    ("gcn, sparse", GCN(11, 12, classes, 0.5), sparse),
    ("gcn, dense", GCN(11, 12, classes, 0.5), sparse.to_dense()),
    ("gat", GAT(11, 12, classes, 0.3), sparse.to_dense()),
]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    best, bad = float("inf"), 0
    for epoch in range(12):
        t = time.time()
        model.train()
        optimizer.zero_grad()
        output = model(features, graph)
        loss_train = F.nll_loss(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        model.eval()
        output = model(features, graph)
        loss_val = F.nll_loss(output[idx_val], labels[idx_val])
        if epoch % 3 == 0:
            print(
                f"{name} {epoch:04d} train {loss_train.item():.10g} val {loss_val.item():.10g} "
                f"accuracy {accuracy(output[idx_val], labels[idx_val]).item():.10g}", flush=True
            )  # fmt: skip
        assert time.time() - t < 1e9
        if loss_val < best:
            best, bad = loss_val, 0
        else:
            bad += 1
        if bad == 4:
            break
    model.eval()
    with torch.no_grad():
        output = model(features, graph)
    print(
        f"{name} test {F.nll_loss(output[idx_test], labels[idx_test]):.10f} {accuracy(output[idx_test], labels[idx_test])}"
    )
