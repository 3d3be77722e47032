"""From settings, samples and a network to the step that trains it."""

from torch import nn

from ..data.batches import Batches, Samples
from ..factory import Process
from ..models.flat_parameters import FlatParameters
from ..plan.step.network import training_network
from ..process.objective import Objective
from ..runtime.distributed import Processes
from .gradient_sum import GradientSum
from .optimizer import Optimizer
from .train_step import TrainStep
from .trainer import TrainSettings


def build_step(
    model: nn.Module,
    flat: FlatParameters,  # of the model
    optimizer: Optimizer,
    samples: Samples,
    flip: bool,  # mirror half of the samples
    process: Process,
    settings: TrainSettings,
    processes: Processes,
    begins: int = 0,  # see `Batches`
) -> TrainStep:
    """One step of training, from the batch to the update."""
    device, backend = flat.param.device, model.backend
    objective = Objective(
        process.schedule,
        backend,
        prediction=process.prediction,
        variance=process.variance,
        device=device,
        weights=process.weights(),
        sigma_data=process.sigma_data,
        draws=process.draws(),
        timesteps=process.timesteps(settings.batch_size, backend, device),
    )
    gradient_sum = GradientSum(flat, processes, norm=optimizer.norm)
    network = training_network(
        model,
        flat,
        recompute=settings.recompute,
        ready=gradient_sum.listener,
        urgent=gradient_sum.urgent,
    )
    share = processes.share_of(settings.batch_size)
    return TrainStep(
        network,
        objective,
        Batches(samples, settings.batch_size, settings.seed, device, *share, begins=begins),
        flat,
        optimizer,
        gradient_sum,
        seed=settings.seed,
        steps=settings.steps,
        accumulate=settings.accumulate,
        flip=flip,
        condition_dropout=getattr(model, "condition_dropout", 0.0),
        capture=settings.cuda_graph,
    )
