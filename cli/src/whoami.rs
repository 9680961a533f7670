//! `construct whoami`: the user or key that the gateway authenticates.

use clap::Args;
use construct_proto::v1::{WhoAmIRequest, WhoAmIResponse};

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::OutputArgs,
};

#[derive(Debug, Args)]
pub(crate) struct WhoAmIArgs {
    #[command(flatten)]
    output: OutputArgs,
}

impl WhoAmIArgs {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let me: WhoAmIResponse = call(gateway.organizations().who_am_i(WhoAmIRequest {})).await?;
        let role = me.role().as_str_name().trim_start_matches("ROLE_").to_lowercase();
        let scopes = me.scopes.join(", ");
        let text: String = [
            ("user", me.user_id.as_str()),
            ("name", &me.name),
            ("email", &me.email),
            ("key", &me.api_key_id),
            ("organization", &me.organization_id),
            ("role", &role),
            ("scopes", &scopes),
        ]
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{:<14}{value}\n", format!("{name}:")))
        .collect();
        self.output.message("construct.v1.WhoAmIResponse", &me, &text)
    }
}
