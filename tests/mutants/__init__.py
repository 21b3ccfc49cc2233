"""Wrong answers that a student writes, as small patches; test_mutants.py puts each in and expects red.

A patch is a list of (old text, new text). The old text must stand in the file exactly once: when the file is
rewritten, the patch has to be too, and the test says so.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One wrong answer: what it is, the file it is written in, and the patch that puts it there."""

    name: str
    file: str
    patch: list[tuple[str, str]]


RESIDUAL = "return log_z.unsqueeze(1) + log_pi - log_ref - reward / beta"
MEAN = "return (log_ref + reward / beta - log_pi).mean(1).detach()"
LOSS = "return tb_residual(log_pi, log_ref, reward, log_z, beta).square().mean()"
VARGRAD = "        log_z = vargrad_log_z(log_pi, log_ref, reward, beta)\n    elif"
MASK = "inside = answer_mask(lengths, token_logp.shape[1])"
SUM = "return token_logp.masked_fill(~inside, 0.0).sum(1)"
# trainer.py: what is changed follows this line, whatever comes behind it
LOG_PI = "log_pi=sequence_logprobs(token_pi, lengths).view(shape)"
TB_CALL = "lambda a, c: tb_loss(a.log_pi, a.log_ref, a.reward, a.beta, a.log_z)"
RESIDUALS = "tb_residual(a.log_pi, a.log_ref, a.reward, vargrad_log_z(a.log_pi, a.log_ref, a.reward, a.beta), a.beta)"
IMPORT = ("from loss import sequence_logprobs, tb_loss\n", "from loss import *\n")

MUTANTS = [
    Mutant(
        "beta multiplied",
        "loss.py",
        [(RESIDUAL, RESIDUAL.replace("/ beta", "* beta")), (MEAN, MEAN.replace("/ beta", "* beta"))],
    ),
    Mutant(
        "reward sign",
        "loss.py",
        [(RESIDUAL, RESIDUAL.replace("- reward", "+ reward")), (MEAN, MEAN.replace("+ reward", "- reward"))],
    ),
    Mutant("batch-wide mean", "loss.py", [(MEAN, MEAN.replace(".mean(1)", ".mean().expand(len(log_pi))"))]),
    Mutant("K-major view", "trainer.py", [(LOG_PI, LOG_PI.replace(".view(shape)", ".view(shape[::-1]).T"))]),
    Mutant(
        "no reference term",
        "loss.py",
        [(RESIDUAL, RESIDUAL.replace("- log_ref ", "")), (MEAN, MEAN.replace("log_ref + ", ""))],
    ),
    Mutant("token-mean log-probability", "loss.py", [(SUM, SUM + " / lengths.clamp(min=1)")]),
    Mutant("EOS dropped", "loss.py", [(MASK, MASK.replace("lengths,", "lengths - 1,"))]),
    Mutant("no padding mask", "loss.py", [(SUM, "return token_logp.sum(1)")]),
    Mutant(  # log_ref comes from the searcher, where the padding is another batch's
        "padding filled on one side",
        "trainer.py",
        [(LOG_PI, LOG_PI.replace("lengths)", "lengths.add(token_pi.shape[1] - lengths))"))],
    ),
    Mutant(  # its value; the gradient stays pi's
        "behaviour log-probability in place of the current one",
        "trainer.py",
        [(TB_CALL, TB_CALL.replace("a.log_pi,", "a.log_pi + (a.log_mu - a.log_pi).detach(),"))],
    ),
    Mutant(
        "leave-one-out mean",
        "loss.py",
        [
            (VARGRAD, VARGRAD.replace("= vargrad", "= _others")),
            (RESIDUAL, RESIDUAL.replace("log_z.unsqueeze(1)", "(log_z if log_z.ndim == 2 else log_z.unsqueeze(1))")),
            (
                "def tb_residual(",
                "def _others_log_z(log_pi, log_ref, reward, beta):\n"
                "    u = log_ref + reward / beta - log_pi\n"
                "    return ((u.sum(1, keepdim=True) - u) / (u.shape[1] - 1)).detach()\n\n\n"
                "def tb_residual(",
            ),
        ],
    ),
    Mutant(
        "K-1 divisor",
        "loss.py",
        [(LOSS, LOSS.replace(".mean()", ".sum(1).div(log_pi.shape[1] - 1).mean()"))],
    ),
    Mutant(
        "an extra importance weight",
        "trainer.py",
        [(TB_CALL, f"lambda a, c: ((a.log_pi - a.log_mu).exp().detach() * {RESIDUALS}.square()).mean()"), IMPORT],
    ),
]

# The same mistakes in another place, or written in another way.
VARIANTS = [
    Mutant("beta multiplied, in the residual alone", "loss.py", [(RESIDUAL, RESIDUAL.replace("/ beta", "* beta"))]),
    Mutant("reward sign, in the residual alone", "loss.py", [(RESIDUAL, RESIDUAL.replace("- reward", "+ reward"))]),
    Mutant(
        "no reference term, in the trainer", "trainer.py", [(TB_CALL, TB_CALL.replace("a.log_ref", "0 * a.log_ref"))]
    ),
    Mutant(
        "EOS dropped where it is also the padding",
        "trainer.py",
        [(LOG_PI, LOG_PI.replace("lengths)", "torch.tensor([int((t.response != self.pad).sum()) for t in flat]))"))],
    ),
    Mutant("padding filled with +1, as published", "loss.py", [(SUM, SUM.replace("0.0", "1.0"))]),
    Mutant("temperature forgotten", "trainer.py", [("*tokens, temperature, states_too)", "*tokens, 1.0, states_too)")]),
    Mutant("answers shifted by one", "runtime/policy.py", [("out.logits[:, :-1]", "out.logits[:, 1:]")]),
    Mutant("left padding unmasked", "runtime/policy.py", [("if tokens.mask is not None:", "if False:")]),
    Mutant("micro-batches summed", "trainer.py", [("share = len(part) / len(groups)", "share = 1.0")]),
    Mutant("learned log Z detached", "loss.py", [(LOSS, LOSS.replace("log_z,", "log_z.detach(),"))]),
    Mutant(
        "squared mean in place of mean square",
        "loss.py",
        [(LOSS, LOSS.replace(".square().mean()", ".mean().square()"))],
    ),
    Mutant("absolute residual", "loss.py", [(LOSS, LOSS.replace(".square()", ".abs()"))]),
    Mutant(
        "RLOO with the group mean",
        "baselines.py",
        [("_centred(reward).detach() * (k / (k - 1))", "_centred(reward).detach()")],
    ),
    Mutant(
        "frozen KL not frozen",
        "baselines.py",
        [("beta * (log_mu - log_ref)).detach()", "beta * (log_pi - log_ref)).detach()")],
    ),
    Mutant(
        "TBA' advantage not detached",
        "baselines.py",
        [("beta * (log_pi - log_ref)).detach()", "beta * (log_pi - log_ref))")],
    ),
    Mutant("TBA' unclipped", "baselines.py", [(".clamp(max=clip)", "")]),
    Mutant("GRPO: maximum for minimum", "baselines.py", [("torch.minimum(ratio", "torch.maximum(ratio")]),
    Mutant(
        "GRPO: mean over padded tokens",
        "baselines.py",
        [("answers / lengths.clamp(min=1)", "answers / log_pi.shape[-1]")],
    ),
    Mutant("Dr. GRPO keeps 1/length", "baselines.py", [("answers if dr else answers /", "answers /")]),
    Mutant("Dr. GRPO keeps the std", "baselines.py", [("if not dr:", "if True:")]),
    Mutant(
        "V-trace: rho in place of c", "baselines.py", [("discounts[:, t] * c[:, t]", "discounts[:, t] * rho[:, t]")]
    ),
    Mutant(
        "V-trace: V in place of v in the advantage",
        "baselines.py",
        [("targets[:, 1:], bootstrap.unsqueeze(1)", "values[:, 1:], bootstrap.unsqueeze(1)")],
    ),
    Mutant("V-trace: the critic's targets move", "baselines.py", [("@torch.no_grad()\ndef vtrace", "def vtrace")]),
    Mutant(
        "V-trace: bootstrap behind the padding",
        "baselines.py",
        [("torch.where(inside, values, bootstrap.unsqueeze(1))", "values.masked_fill(~inside, 0.0)")],
    ),
]

# Right answers that look different: these must stay green.
EQUIVALENTS = [
    Mutant(
        "log Z not detached inside tb_loss",
        "loss.py",
        [(VARGRAD, "        log_z = (log_ref + reward / beta - log_pi).mean(1)\n    elif")],
    ),
    Mutant("the residual's sign", "loss.py", [(RESIDUAL, RESIDUAL.replace("return ", "return -(") + ")")]),
    Mutant(
        "the mask by torch.where",
        "loss.py",
        [(SUM, "return torch.where(inside, token_logp, torch.zeros_like(token_logp)).sum(1)")],
    ),
    Mutant(
        "the mean of the groups' means",
        "loss.py",
        [(LOSS, LOSS.replace(".mean()", ".mean(1).mean()"))],
    ),
    Mutant(
        "frozen log pi_ref of the batch, flattened and back",
        "trainer.py",
        [(TB_CALL, TB_CALL.replace("a.log_ref,", "a.log_ref.flatten().view(a.reward.shape),"))],
    ),
]
