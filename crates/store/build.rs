//! Has cargo compile the crate again when a migration is added: the macro that embeds them cannot
//! ask for it itself.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
