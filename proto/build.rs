//! Compiles the contracts: `protox` parses them in Rust, so no `protoc` is needed.

use std::{env, fs, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "construct/v1/agent.proto",
        "construct/v1/api_key.proto",
        "construct/v1/approval.proto",
        "construct/v1/audit.proto",
        "construct/v1/budget.proto",
        "construct/v1/common.proto",
        "construct/v1/diagnosis.proto",
        "construct/v1/event.proto",
        "construct/v1/file.proto",
        "construct/v1/message.proto",
        "construct/v1/model.proto",
        "construct/v1/model_provider.proto",
        "construct/v1/model_token.proto",
        "construct/v1/organization.proto",
        "construct/v1/policy.proto",
        "construct/v1/recovery.proto",
        "construct/v1/scan.proto",
        "construct/v1/schedule.proto",
        "construct/v1/secret.proto",
        "construct/v1/state.proto",
        "construct/v1/task.proto",
        "construct/v1/usage.proto",
        "construct/mesh/v1/membership.proto",
        "construct/mesh/v1/mesh.proto",
        "construct/mesh/v1/routing.proto",
        "construct/mesh/v1/scan.proto",
        "construct/mesh/v1/slack.proto",
        "construct/mesh/v1/spending.proto",
        "construct/mesh/v1/state.proto",
        "construct/mesh/v1/subtasks.proto",
    ];
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        .compile_well_known_types(false)
        // Rarely there, and far larger than the other kinds of events.
        .boxed(".construct.v1.TaskStatus.below")
        .boxed(".construct.v1.Event.payload.task")
        // They hold values; what is printed of them stands in src/lib.rs.
        .skip_debug([
            ".construct.v1.ScanConnectionSpec",
            ".construct.v1.ScanConnectionSpec.credential",
            ".construct.v1.GitHubApp",
            ".construct.v1.ScanUpload",
            ".construct.v1.SecretSpec",
            ".construct.v1.UpdateSecretRequest",
            ".construct.v1.State",
            ".construct.v1.PutStateRequest",
            ".construct.v1.UploadPartRequest",
            ".construct.v1.DownloadFileResponse",
            ".construct.v1.ModelToken",
            ".construct.v1.CreateApiKeyResponse",
            ".construct.v1.SetupCode",
            ".construct.v1.ExchangeSetupCodeRequest",
            ".construct.mesh.v1.CodeExecute",
        ])
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=construct");
    Ok(())
}
