"""The options of a run, in sections that follow the data flow. Importing them does not import
torch.

A section is a frozen dataclass, and each of its fields is an option. The type of a field defines
the allowed values, and the docstring under the field is its help text. A recipe is a function that
returns a `RunConfig`, which has all sections.
"""

from unstale.config.algorithm import AdvantageConfig as AdvantageConfig
from unstale.config.algorithm import AuditConfig as AuditConfig
from unstale.config.algorithm import CorrectionConfig as CorrectionConfig
from unstale.config.algorithm import CriticConfig as CriticConfig
from unstale.config.algorithm import Unit as Unit
from unstale.config.checks import ConfigError as ConfigError
from unstale.config.cluster import ClusterConfig as ClusterConfig
from unstale.config.extras import install as install
from unstale.config.names import nearest as nearest
from unstale.config.objectives import ObjectiveConfig as ObjectiveConfig
from unstale.config.routes import OldLogpsConfig as OldLogpsConfig
from unstale.config.run import MAX_SEED as MAX_SEED
from unstale.config.run import SHIPPED_POLICIES as SHIPPED_POLICIES
from unstale.config.run import SHIPPED_POLICY as SHIPPED_POLICY
from unstale.config.run import RunConfig as RunConfig
from unstale.config.sampling import Adapters as Adapters
from unstale.config.sampling import Dtype as Dtype
from unstale.config.sampling import EndpointConfig as EndpointConfig
from unstale.config.sampling import EngineConfig as EngineConfig
from unstale.config.sampling import RolloutConfig as RolloutConfig
from unstale.config.sampling import Scenarios as Scenarios
from unstale.config.sampling import ScheduleConfig as ScheduleConfig
from unstale.config.sampling import SelectionConfig as SelectionConfig
from unstale.config.sampling import Transfer as Transfer
from unstale.config.sampling import fast_dtype as fast_dtype
from unstale.config.sampling import staleness_bound as staleness_bound
from unstale.config.tasks import TaskConfig as TaskConfig
from unstale.config.tasks import make_task as make_task
from unstale.config.training import CheckpointConfig as CheckpointConfig
from unstale.config.training import EvalConfig as EvalConfig
from unstale.config.training import JournalConfig as JournalConfig
from unstale.config.training import SftConfig as SftConfig
from unstale.config.training import TrainerConfig as TrainerConfig
