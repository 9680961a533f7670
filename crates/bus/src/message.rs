//! The protobuf messages of the mesh and their names.

use construct_proto::{mesh::v1 as mesh, v1};

/// A payload of the mesh.
pub trait Message: prost::Message + Default + Send + Sync + 'static {
    /// The full protobuf name, as in the header `Construct-Type`.
    const NAME: &'static str;
}

macro_rules! messages {
    ($($message:ty => $name:literal;)*) => {
        $(impl Message for $message {
            const NAME: &'static str = $name;
        })*

        #[cfg(test)]
        pub(crate) const NAMES: &[&str] = &[$($name),*];
    };
}

messages! {
    mesh::BreakerChanged => "construct.mesh.v1.BreakerChanged";
    mesh::BreakerQuery => "construct.mesh.v1.BreakerQuery";
    mesh::BreakersRequest => "construct.mesh.v1.BreakersRequest";
    mesh::BudgetReserve => "construct.mesh.v1.BudgetReserve";
    mesh::BudgetReserved => "construct.mesh.v1.BudgetReserved";
    mesh::CancelStep => "construct.mesh.v1.CancelStep";
    mesh::CodeExecute => "construct.mesh.v1.CodeExecute";
    mesh::DeadLetter => "construct.mesh.v1.DeadLetter";
    mesh::JournalEntry => "construct.mesh.v1.JournalEntry";
    mesh::ResolvedModel => "construct.mesh.v1.ResolvedModel";
    mesh::ModelInvoke => "construct.mesh.v1.ModelInvoke";
    mesh::ModelLookup => "construct.mesh.v1.ModelLookup";
    mesh::ReconcilerHeartbeat => "construct.mesh.v1.ReconcilerHeartbeat";
    mesh::Repositories => "construct.mesh.v1.Repositories";
    mesh::RepositoriesQuery => "construct.mesh.v1.RepositoriesQuery";
    mesh::ScanRun => "construct.mesh.v1.ScanRun";
    mesh::SlackDelivery => "construct.mesh.v1.SlackDelivery";
    mesh::SpendingReport => "construct.mesh.v1.SpendingReport";
    mesh::ProviderCheck => "construct.mesh.v1.ProviderCheck";
    mesh::ProviderCheckResult => "construct.mesh.v1.ProviderCheckResult";
    mesh::StateChanged => "construct.mesh.v1.StateChanged";
    mesh::StepResult => "construct.mesh.v1.StepResult";
    mesh::SubtaskResponse => "construct.mesh.v1.SubtaskResponse";
    mesh::SubtaskRequest => "construct.mesh.v1.SubtaskRequest";
    mesh::TaskCensus => "construct.mesh.v1.TaskCensus";
    mesh::TaskWake => "construct.mesh.v1.TaskWake";
    mesh::DeletedTasks => "construct.mesh.v1.DeletedTasks";
    mesh::TokenCount => "construct.mesh.v1.TokenCount";
    mesh::TokenCountQuery => "construct.mesh.v1.TokenCountQuery";
    mesh::ToolCatalog => "construct.mesh.v1.ToolCatalog";
    mesh::ToolCreate => "construct.mesh.v1.ToolCreate";
    mesh::ToolCatalogRequest => "construct.mesh.v1.ToolCatalogRequest";
    mesh::VendorModels => "construct.mesh.v1.VendorModels";
    mesh::VendorModelsQuery => "construct.mesh.v1.VendorModelsQuery";
    mesh::StepLocation => "construct.mesh.v1.StepLocation";
    mesh::StepLocationQuery => "construct.mesh.v1.StepLocationQuery";
    v1::Breaker => "construct.v1.Breaker";
    v1::Event => "construct.v1.Event";
    v1::ScanEvent => "construct.v1.ScanEvent";
}

#[cfg(test)]
mod tests {
    use construct_proto::DESCRIPTORS;

    use super::NAMES;

    #[test]
    fn message_names_exist_in_the_contracts() {
        for name in NAMES {
            assert!(DESCRIPTORS.get_message_by_name(name).is_some(), "{name}");
        }
    }
}
