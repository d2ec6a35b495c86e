// Renders a chart as `helm template` does, for machines that have no helm: the same template engine, the same functions.
//
//	render [-namespace NS] [-release NAME] [-f VALUES]... [-notes] CHART
//
// Values are merged as helm merges them (a null removes); a template that fails is an error that names it. The schema of
// the values is not looked at here.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"
)

type chart struct {
	values    map[string]interface{}
	metadata  map[string]interface{}
	templates map[string]string // by the name that helm gives them, chart/templates/…
	files     files
}

type paths []string

func (p *paths) String() string         { return strings.Join(*p, ",") }
func (p *paths) Set(value string) error { *p = append(*p, value); return nil }

func readYaml(path string) (map[string]interface{}, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	read := map[string]interface{}{}
	// By way of JSON, as helm does: all numbers are float64.
	if err := yaml.Unmarshal(text, &read); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return read, nil
}

// merge puts what `over` says into `under`.
func merge(under, over map[string]interface{}) map[string]interface{} {
	merged := map[string]interface{}{}
	for key, value := range under {
		merged[key] = value
	}
	for key, value := range over {
		if value == nil {
			delete(merged, key)
			continue
		}
		above, isMap := value.(map[string]interface{})
		below, wasMap := merged[key].(map[string]interface{})
		if isMap && wasMap {
			merged[key] = merge(below, above)
		} else {
			merged[key] = value
		}
	}
	return merged
}

func load(directory string) (*chart, error) {
	loaded := &chart{templates: map[string]string{}, files: files{}}
	var err error
	if loaded.metadata, err = readYaml(filepath.Join(directory, "Chart.yaml")); err != nil {
		return nil, err
	}
	if loaded.values, err = readYaml(filepath.Join(directory, "values.yaml")); err != nil {
		return nil, err
	}
	name, _ := loaded.metadata["name"].(string)
	err = filepath.Walk(directory, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(directory, path)
		if err != nil {
			return err
		}
		if strings.HasPrefix(inside, "templates/") {
			loaded.templates[name+"/"+inside] = string(text)
		} else {
			loaded.files[inside] = text
		}
		return nil
	})
	return loaded, err
}

// chartObject is what templates see as .Chart: helm's names of the fields begin with a capital.
func chartObject(metadata map[string]interface{}) map[string]interface{} {
	object := map[string]interface{}{}
	for key, value := range metadata {
		object[strings.ToUpper(key[:1])+key[1:]] = value
	}
	return object
}

func render(loaded *chart, values map[string]interface{}, release, namespace string) (map[string]string, error) {
	top := map[string]interface{}{
		"Values": values,
		"Chart":  chartObject(loaded.metadata),
		"Release": map[string]interface{}{
			"Name": release, "Namespace": namespace, "Service": "Helm", "IsInstall": true, "IsUpgrade": false, "Revision": 1,
		},
		"Capabilities": map[string]interface{}{
			"KubeVersion": map[string]interface{}{"Version": "v1.31.0", "Major": "1", "Minor": "31"},
			"APIVersions": apiVersions{"v1", "apps/v1"},
		},
		"Files": loaded.files,
	}
	engine := template.New("chart").Option("missingkey=zero")
	engine.Funcs(functions(engine))
	names := make([]string, 0, len(loaded.templates))
	for name := range loaded.templates {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if _, err := engine.New(name).Parse(loaded.templates[name]); err != nil {
			return nil, err
		}
	}
	rendered := map[string]string{}
	for _, name := range names {
		if strings.HasPrefix(filepath.Base(name), "_") {
			continue
		}
		top["Template"] = map[string]interface{}{"Name": name, "BasePath": filepath.Dir(name)}
		var text bytes.Buffer
		if err := engine.ExecuteTemplate(&text, name, top); err != nil {
			return nil, err
		}
		// As helm: a key that is missing prints as nothing.
		rendered[name] = strings.ReplaceAll(text.String(), "<no value>", "")
	}
	return rendered, nil
}

func run() error {
	var given paths
	flag.Var(&given, "f", "a file of values; later ones win")
	release := flag.String("release", "holdfast", "name of the release")
	namespace := flag.String("namespace", "holdfast", "its namespace")
	notes := flag.Bool("notes", false, "print NOTES.txt instead of the manifests")
	flag.Parse()
	if flag.NArg() != 1 {
		return fmt.Errorf("usage: render [-namespace NS] [-release NAME] [-f VALUES]... [-notes] CHART")
	}
	loaded, err := load(flag.Arg(0))
	if err != nil {
		return err
	}
	values := loaded.values
	for _, path := range given {
		more, err := readYaml(path)
		if err != nil {
			return err
		}
		values = merge(values, more)
	}
	rendered, err := render(loaded, values, *release, *namespace)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(rendered))
	for name := range rendered {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		isNotes := filepath.Base(name) == "NOTES.txt"
		switch {
		case isNotes != *notes || strings.TrimSpace(rendered[name]) == "":
		case isNotes:
			fmt.Print(rendered[name])
		default:
			fmt.Printf("---\n# Source: %s\n%s\n", name, rendered[name])
		}
	}
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}
