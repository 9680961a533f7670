//! The launchd of macOS, which runs agents of the person who is logged in, and the file by which it
//! knows ours.

use std::{
    env, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use rustix::process::getuid;

use super::{
    systemd::complaint,
    units::{self, Settings, Unit},
};
use crate::{failure::Failure, mesh};

/// What the agent is called.
const LABEL: &str = "construct.mesh";
/// Its file.
const FILE: &str = "construct.mesh.plist";
/// What a file begins with that this program wrote.
pub(crate) const MARK: &str = "\
<?xml version=\"1.0\" encoding=\"UTF-8\"?>
<!-- Written by `construct daemon install`, which replaces it. -->
";
/// What `launchctl bootout` ends with while that which it ends takes its time (`EINPROGRESS` of
/// macOS).
const IN_PROGRESS: i32 = 36;

/// The folder of a person's settings, agents and logs.
///
/// # Errors
/// When nothing says where the person's files are.
fn library() -> Result<PathBuf, Failure> {
    let home = env::var_os("HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    home.map(|home| home.join("Library"))
        .ok_or_else(|| Failure::usage("launchd's agents are kept below HOME, which is not set"))
}

/// Where launchd looks for agents of this person at log-in.
///
/// # Errors
/// When nothing says where the person's files are.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(library()?.join("LaunchAgents"))
}

/// Where the file belongs.
///
/// # Errors
/// When nothing says where the person's files are.
pub(crate) fn path() -> Result<PathBuf, Failure> {
    Ok(folder()?.join(FILE))
}

/// The file.
///
/// # Errors
/// When a path cannot be written into it.
pub(crate) fn agent(settings: &Settings) -> Result<Unit, Failure> {
    agent_in(settings, &library()?)
}

fn agent_in(settings: &Settings, library: &Path) -> Result<Unit, Failure> {
    let program = escaped(&settings.program)?;
    let mut variables = settings.variables();
    // Without it launchd looks for programs where only the system's are.
    variables.extend(settings.search.as_deref().map(|search| ("PATH", search)));
    let mut environment = String::new();
    for (name, value) in variables {
        environment.push_str(&format!(
            "    <key>{name}</key>\n    <string>{}</string>\n",
            escaped(value)?
        ));
    }
    let log = escaped(&library.join("Logs").join("construct.log"))?;
    let text = format!(
        "\
{MARK}<!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">
<plist version=\"1.0\">
<dict>
  <key>Label</key>
  <string>{LABEL}</string>
  <key>ProgramArguments</key>
  <array>
    <string>{program}</string>
    <string>daemon</string>
    <string>run</string>
  </array>
  <key>EnvironmentVariables</key>
  <dict>
{environment}  </dict>
  <key>RunAtLoad</key>
  <true/>
  <!-- Anew when it fails, and not when it was told to stop. -->
  <key>KeepAlive</key>
  <dict>
    <key>SuccessfulExit</key>
    <false/>
  </dict>
  <key>ThrottleInterval</key>
  <integer>10</integer>
  <key>ExitTimeOut</key>
  <integer>90</integer>
  <!-- Not slowed down as what works in the background is. -->
  <key>ProcessType</key>
  <string>Interactive</string>
  <key>StandardOutPath</key>
  <string>{log}</string>
  <key>StandardErrorPath</key>
  <string>{log}</string>
</dict>
</plist>
"
    );
    Ok(Unit { name: FILE, mark: MARK, text })
}

/// Where the data is of what is installed, if it is.
pub(crate) fn data(file: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(file).ok().filter(|text| text.starts_with(MARK))?;
    let key = format!("<key>{}</key>", mesh::HOME);
    let mut lines = text.lines().map(str::trim);
    lines.find(|line| *line == key)?;
    let value = lines.next()?.strip_prefix("<string>")?.strip_suffix("</string>")?;
    Some(value.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").into())
}

/// A path as the text of an element.
fn escaped(path: &Path) -> Result<String, Failure> {
    Ok(units::text(path)?.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;"))
}

/// It answers.
#[derive(Debug)]
pub(crate) struct Launchd {
    /// The agents of this person's log-in.
    domain: String,
}

impl Launchd {
    /// # Errors
    /// When there is none, or nobody is logged in.
    pub(crate) fn find() -> Result<Self, Failure> {
        let domain = format!("gui/{}", getuid().as_raw());
        let why = match launchctl(&["print", &domain]) {
            Ok(done) if done.status.success() => return Ok(Self { domain }),
            Ok(done) => complaint(&done),
            Err(error) if error.kind() == ErrorKind::NotFound => "there is no launchctl".to_owned(),
            Err(error) => format!("launchctl cannot be run: {error}"),
        };
        Err(Failure::failed(format!("no launchd runs agents for you here ({why})")).hint(
            "it does for who is logged in at the screen; construct daemon run runs the mesh in the foreground, install --no-start writes the file all the same",
        ))
    }

    /// Whether it has read the agent's file, at log-in or when it was told to.
    ///
    /// # Errors
    /// When launchctl cannot be run.
    pub(crate) fn has(&self) -> Result<bool, Failure> {
        // What it says besides is for people, by its own words, and of another form in each
        // version.
        Ok(launchctl(&["print", &self.target()])?.status.success())
    }

    /// Has it read the file, and start what it names.
    ///
    /// # Errors
    /// When launchd refuses.
    pub(crate) fn add(&self, file: &Path) -> Result<(), Failure> {
        // It refuses what was disabled once.
        run(&["enable", &self.target()])?;
        run(&["bootstrap", &self.domain, units::text(file)?])
    }

    /// Has it stop what runs, and forget the file until the next log-in.
    ///
    /// # Errors
    /// When launchd refuses.
    pub(crate) fn remove(&self) -> Result<(), Failure> {
        let target = self.target();
        let arguments = ["bootout", target.as_str()];
        let done = launchctl(&arguments)?;
        if done.status.code() == Some(IN_PROGRESS) { Ok(()) } else { accepted(&arguments, &done) }
    }

    fn target(&self) -> String {
        format!("{}/{LABEL}", self.domain)
    }
}

fn run(arguments: &[&str]) -> Result<(), Failure> {
    accepted(arguments, &launchctl(arguments)?)
}

fn accepted(arguments: &[&str], done: &Output) -> Result<(), Failure> {
    if done.status.success() {
        return Ok(());
    }
    Err(Failure::failed(format!("launchctl {}: {}", arguments.join(" "), complaint(done))))
}

fn launchctl(arguments: &[&str]) -> std::io::Result<Output> {
    Command::new("launchctl").args(arguments).output()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Place;

    fn settings() -> Settings {
        Settings {
            program: "/opt/a b/construct".into(),
            place: Place {
                script: "/src/R&D/deploy/docker/mesh".into(),
                home: "/Users/ann/construct".into(),
            },
            target: None,
            environment: "/Users/ann/.config/construct/daemon.env".into(),
            search: Some("/opt/homebrew/bin:/usr/bin:/bin".into()),
        }
    }

    #[test]
    fn the_file_is_as_it_is_documented() {
        let agent = agent_in(&settings(), Path::new("/Users/ann/Library")).unwrap();
        assert_eq!((agent.name, agent.mark), (FILE, MARK));
        assert_eq!(agent.text, include_str!("golden/construct.mesh.plist"));
    }

    #[test]
    fn what_xml_would_read_otherwise_is_escaped_and_read_back() {
        let home = Path::new("/a <b> & &amp; \"c\" </string>");
        let place = Place { home: home.to_owned(), ..settings().place };
        let odd = Settings { place, target: Some("/t<".into()), ..settings() };
        let agent = agent_in(&odd, Path::new("/Users/<ann>/Library")).unwrap();
        for line in [
            "    <string>/a &lt;b&gt; &amp; &amp;amp; \"c\" &lt;/string&gt;</string>",
            "    <key>CARGO_TARGET_DIR</key>",
            "    <string>/t&lt;</string>",
            "  <string>/Users/&lt;ann&gt;/Library/Logs/construct.log</string>",
        ] {
            assert!(agent.text.lines().any(|found| found == line), "{line}: {}", agent.text);
        }
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(data(&folder.path().join(FILE)), None);
        agent.write(folder.path()).unwrap();
        assert_eq!(data(&folder.path().join(FILE)).as_deref(), Some(home));
        let broken = Settings { program: "/a\u{1}".into(), ..settings() };
        assert!(
            agent_in(&broken, Path::new("/Users/ann/Library")).is_err(),
            "XML has no such character"
        );
    }
}
