//! Compiles the contracts: `protox` parses them in Rust, so no `protoc` is needed.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files = Vec::new();
    find(Path::new("construct"), &mut files)?;
    files.sort_unstable();
    let mut compiler = protox::Compiler::new(["."])?;
    compiler.include_source_info(true).include_imports(true).open_files(files)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // Encoded by the compiler: prost's types of descriptors would lose our options.
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;
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
        .compile_fds(compiler.file_descriptor_set())?;
    println!("cargo:rerun-if-changed=construct");
    println!("cargo:rerun-if-changed=google");
    Ok(())
}

/// Adds every `.proto` file below a folder.
fn find(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    Ok(())
}
